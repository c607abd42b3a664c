//! pipeline
fn main() {}
