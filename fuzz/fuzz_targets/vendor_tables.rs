#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::properties::vendor_tables(data));
