//! The attributes of `test_harness`, which says what they mean.

use proc_macro::TokenStream;
use quote::quote;
use syn::{Error, ItemFn, MetaNameValue, parse_macro_input};

/// Makes a function a test of its suite: `#[test]`, or `#[test(each = VALUES)]` for a test of each of several values.
#[proc_macro_attribute]
pub fn test(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let function = parse_macro_input!(item as ItemFn);
    let name = &function.sig.ident;
    let cases = if arguments.is_empty() {
        quote!(vec![::test_harness::Case::only(#name)])
    } else {
        let each = parse_macro_input!(arguments as MetaNameValue);
        if !each.path.is_ident("each") {
            return Error::new_spanned(each.path, "expected `each`").into_compile_error().into();
        }
        let values = each.value;
        quote!((#values).into_iter().map(|value| ::test_harness::Case::of(value, #name)).collect())
    };
    quote! {
        #function

        ::test_harness::inventory::submit! {
            ::test_harness::Test { module: module_path!(), name: stringify!(#name), cases: || #cases }
        }
    }
    .into()
}

/// Makes a function one that tests of its suite run in a process of its own: `test_harness::child` starts it.
#[proc_macro_attribute]
pub fn child(_: TokenStream, item: TokenStream) -> TokenStream {
    let function = parse_macro_input!(item as ItemFn);
    let name = &function.sig.ident;
    quote! {
        #function

        ::test_harness::inventory::submit! { ::test_harness::Child { name: stringify!(#name), run: #name } }
    }
    .into()
}
