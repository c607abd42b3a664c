//! `#[derive(Parameters)]`: a struct's fields as reader, checks, key and JSON Schema.

use proc_macro::TokenStream;

/// Derives `Parameter` for a struct or for an enum of unit variants.
#[proc_macro_derive(Parameters, attributes(semantic, resumable, cosmetic))]
pub fn derive_parameters(_input: TokenStream) -> TokenStream {
    TokenStream::new()
}
