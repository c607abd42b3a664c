#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| engine::properties::events(data));
