#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| cache::properties::records(data));
