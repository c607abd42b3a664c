#![no_main]

// The hook: see filter.rs.
libfuzzer_sys::fuzz_target!(init: drop(std::panic::take_hook()), |data: &[u8]| stages::properties::templates(data));
