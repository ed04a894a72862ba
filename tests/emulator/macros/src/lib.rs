//! The attribute `#[ascend_emulator::test]`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::{Error, Expr, FnArg, Ident, ItemFn, MetaNameValue, Pat, Token};

/// Runs a function on emulated NPUs, in a process of its own for each host.
///
/// | argument | example | without it |
/// |---|---|---|
/// | `devices` | `devices = 4` | that of `config`: 2 |
/// | `generation` | `generation = "8.5.0"`, `["9.0.0", "26.1"]` or `"all"` | that of `config` |
/// | `faults` | `faults = "MEM_MAP#3=ENOMEM"`, or a list | none |
/// | `seed` | `seed = 17`, a list, or `0..5` | Linux decides the order of calls |
/// | `config` | `config = Config { hbm: 1 << 30, ..Config::default() }` | `Config::default()` |
///
/// The function runs for each generation with each seed. Its first parameter, if it has one, is the
/// `&Emulator`. With further parameters it is not a test but a helper, which tests call with those
/// parameters, as often as they like and also in loops.
#[proc_macro_attribute]
pub fn test(arguments: proc_macro::TokenStream, item: proc_macro::TokenStream) -> proc_macro::TokenStream {
    expand(arguments.into(), item.into()).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(arguments: TokenStream, item: TokenStream) -> Result<TokenStream, Error> {
    let settings = settings(arguments)?;
    let ItemFn { attrs, vis, sig, block, .. } = syn::parse2(item)?;
    if let Some(keyword) = &sig.asyncness {
        return Err(Error::new_spanned(keyword, "start a runtime in the body: the function must not be async"));
    }
    let mut names = Vec::new();
    for parameter in &sig.inputs {
        let FnArg::Typed(typed) = parameter else {
            return Err(Error::new_spanned(parameter, "a test has no self"));
        };
        match &*typed.pat {
            Pat::Ident(pattern) => names.push(pattern.ident.clone()),
            // The emulator may have no name, since the body does not see this one.
            _ if names.is_empty() => names.push(Ident::new("emulator", sig.ident.span())),
            other => return Err(Error::new_spanned(other, "the parameter needs a name")),
        }
    }
    let mut outer = sig.clone();
    outer.inputs = sig.inputs.iter().skip(1).cloned().collect();
    outer.output = syn::ReturnType::Default;
    let harness = outer.inputs.is_empty().then(|| quote!(#[::core::prelude::v1::test]));
    let (name, emulator, rest) = (&sig.ident, names.first(), names.iter().skip(1));
    let passed = emulator.map(|_| quote!(emulator,));
    Ok(quote! {
        #harness
        #(#attrs)*
        #vis #outer {
            #sig #block
            ::ascend_emulator::isolated::run(
                ::ascend_emulator::isolated::Hosts { #settings ..::core::default::Default::default() },
                move |emulator| #name(#passed #(#rest),*),
            )
        }
    })
}

/// The fields of `Hosts` that the arguments of the attribute set.
fn settings(arguments: TokenStream) -> Result<TokenStream, Error> {
    let list = Punctuated::<MetaNameValue, Token![,]>::parse_terminated.parse2(arguments)?;
    let mut known = Vec::new();
    let mut fields = TokenStream::new();
    for MetaNameValue { path, value, .. } in &list {
        let name = path.get_ident().map(Ident::to_string).unwrap_or_default();
        if known.contains(&name) {
            return Err(Error::new_spanned(path, format!("`{name}` is given twice")));
        }
        let several = match value {
            Expr::Array(_) | Expr::Range(_) => quote!(::core::iter::Iterator::collect(
                ::core::iter::IntoIterator::into_iter(#value)
            )),
            _ => quote!(::std::vec![#value]),
        };
        fields.extend(match name.as_str() {
            "config" => quote!(config: #value,),
            "devices" => quote!(devices: ::core::option::Option::Some(#value),),
            "generation" => quote!(generations: #several,),
            "faults" => quote!(faults: #several,),
            "seed" => quote!(seeds: #several,),
            _ => {
                return Err(Error::new_spanned(
                    path,
                    "one of config, devices, generation, faults and seed is expected",
                ));
            }
        });
        known.push(name);
    }
    Ok(fields)
}

#[cfg(test)]
mod tests {
    use super::expand;

    #[track_caller]
    fn refused(arguments: &str, item: &str, reason: &str) {
        let error = expand(arguments.parse().unwrap(), item.parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }

    #[test]
    fn what_the_attribute_does_not_know_is_a_sentence_of_the_compiler() {
        refused("device = 2", "fn test() {}", "one of config, devices, generation, faults and seed");
        refused("seed = 1, seed = 2", "fn test() {}", "`seed` is given twice");
        refused("", "async fn test() {}", "must not be async");
        refused("", "fn test(self) {}", "no self");
        refused("", "fn test(_: &Emulator, (a, b): (u8, u8)) {}", "needs a name");
        refused("seed", "fn test() {}", "=");
    }
}
