#![no_main]

// With the hook that fuzz_target! sets, a panic of a library ends the fuzzer even where the program catches it. With the usual hook only
// one that nothing catches does.
libfuzzer_sys::fuzz_target!(init: drop(std::panic::take_hook()), |data: &[u8]| stages::properties::filter(data));
