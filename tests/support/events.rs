//! Subscribers for the events of the crate `tracing`.

use std::collections::BTreeMap;
use std::fmt::Debug;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Metadata, Subscriber};

/// The fields of an event, as text.
pub type Fields = BTreeMap<String, String>;

/// Calls a function with every event of the library, and without fields when it is asked whether it
/// wants one.
pub struct AtEvent<F>(pub F);

struct Texts(Fields);

impl Visit for Texts {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

impl<F: Fn(Fields) + 'static> Subscriber for AtEvent<F> {
    /// Asked at every event.
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    /// The function is called here, too, as filters are the user's code: without fields.
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let wanted = metadata.target().starts_with("ascend_vmm");
        if wanted {
            (self.0)(Fields::new());
        }
        wanted
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut texts = Texts(Fields::new());
        event.record(&mut texts);
        (self.0)(texts.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
