//! A chat template for a checkpoint that has none.

use std::path::Path;

use serde_json::json;
use stages::data::tokenizer::Tokenizer;

use super::check::Checked;
use crate::import::places::Places;
use crate::import::write;
use crate::recipes::edit::Draft;
use crate::{terminal, words};

/// What ends turns in ChatML.
const TOKENS: [&str; 2] = ["<|im_start|>", "<|im_end|>"];

const NO_TEMPLATE: &str = "The model has no chat template, so that turns are written as ChatML";

/// Those tokens of ChatML that the tokenizer of a checkpoint does not have; `None` where it is not on this machine.
pub(super) fn missing_tokens(model: &str, places: &Places) -> Option<Vec<&'static str>> {
    let tokenizer = Tokenizer::from_folder(&places.find(model)?).ok()?;
    Some(TOKENS.into_iter().filter(|token| tokenizer.token_id(token).is_none()).collect())
}

/// Gives the stages a chat template, and the model its tokens where it can have them, so that a response ends with one.
pub(super) fn give(draft: &mut Draft, file: &Path, missing: Option<&[&str]>) -> Checked {
    for kind in ["tokenize", "evaluate", "generate"] {
        draft.add(kind, "chat_template: chatml");
    }
    let checked = Checked::of(draft, file);
    let plain = match missing {
        Some([]) => {
            draft.explain(format!("{NO_TEMPLATE}."));
            return Checked::of(draft, file);
        }
        // A teacher's vocabulary is that of its student.
        Some(missing) if !draft.has_variable("teacher") => {
            let wider = wider(draft, file, missing);
            if wider.checked.is_no_worse_than(&checked) {
                return wider.take(draft, file, missing);
            }
            format!("{} are no tokens of it", names(missing))
        }
        Some(missing) => format!("{} are no tokens of it", names(missing)),
        None => format!("{} may be no tokens of it", names(&TOKENS)),
    };
    let plain = format!("{plain}, and at plain text no response ends by itself: docs/stages/add_tokens.md");
    draft.explain(format!("{NO_TEMPLATE}."));
    draft.explain(format!("{plain}."));
    if !checked.lacks_chat_template() {
        terminal::tell_line(format_args!("warning: the model has no chat template; ChatML's {plain}"));
    }
    Checked::of(draft, file)
}

/// A draft whose model has further tokens.
struct Wider {
    draft: Draft,
    checked: Checked,
    publishes_an_adapter: bool,
}

fn wider(draft: &Draft, file: &Path, missing: &[&str]) -> Wider {
    let mut wider = draft.clone();
    let parameters = format!("added_special_tokens: {}", write::flow(&json!(missing)));
    wider.put_between("base", "wider", "add_tokens", &parameters);
    wider.explain(format!("{NO_TEMPLATE}, whose {} the stage `wider` adds.", names(missing)));
    let name = words::for_shell(&words::path(Path::new(file.file_name().unwrap_or_default())));
    let about_adapter = [
        "The adapter is one of the model with the added tokens, and does not load on the one without:".to_owned(),
        format!("  pipeline export {name} wider.model FOLDER"),
    ];
    let publishes_an_adapter = wider.remark_published("adapter", &about_adapter);
    let checked = Checked::of(&wider, file);
    Wider { draft: wider, checked, publishes_an_adapter }
}

impl Wider {
    /// Takes it, and says so.
    fn take(self, draft: &mut Draft, file: &Path, missing: &[&str]) -> Checked {
        let tokens = names(missing);
        terminal::tell_line(format_args!("the model has no chat template: ChatML's {tokens} are added to it"));
        if self.publishes_an_adapter {
            let file = words::for_shell(&words::path(file));
            terminal::tell_line(format_args!(
                "the adapter loads on the model with these tokens: `pipeline export {file} wider.model FOLDER`"
            ));
        }
        *draft = self.draft;
        self.checked
    }
}

fn names(tokens: &[&str]) -> String {
    tokens.iter().map(|token| format!("`{token}`")).collect::<Vec<_>>().join(" and ")
}
