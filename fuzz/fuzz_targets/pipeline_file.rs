#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| stages::properties::pipeline_file(data));
