//! What a pipeline file may say about prompts: the same keys wherever text becomes what a model reads.

use std::collections::BTreeMap;

use engine::artifact::Facts;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use engine::parameter::{Json, KeyWriter, Parameter, Parameters, Reader};
use engine::suggest;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::chat::{ChatError, ChatTemplate};
use super::named::{self, NamedTemplate};
use super::render::PromptError;
use crate::compute::checkpoint::{CHAT_TEMPLATE, SAVED_TEMPLATE};
use crate::data::artifact::{MEDIUM, Medium, Message};

/// How text becomes what a model reads, beside the template that stands with the rows.
///
/// A stage kind that makes prompts holds it as `#[semantic(flatten)] prompt: PromptParams`, so that `tokenize`,
/// `evaluate` and `generate` know the same keys, and hands it to [`super::Prompter::new`] or
/// [`super::PromptRenderer::new`], which are the only ways to make a prompt. It is stored with the tokens, as the fact
/// `prompt`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, Parameters)]
#[serde(default)]
pub struct PromptParams {
    /// Whether prompts and texts begin with the beginning-of-text token; default: the tokenizer's configuration. In
    /// conversations the chat template decides.
    #[semantic]
    pub add_bos: Option<bool>,
    /// Whether prompts and texts end with the end-of-text token, which is trained; default: if the tokenizer has one.
    /// In conversations the chat template decides.
    #[semantic]
    pub add_eos: Option<bool>,
    /// A chat template that replaces the tokenizer's own: the name of a family's, or a Jinja template as a string.
    #[semantic]
    pub chat_template: Option<ChatTemplateChoice>,
    /// The system message of conversations without one.
    #[semantic]
    pub system_prompt: Option<String>,
    /// Whether special tokens in the data are encoded as plain text, so that a user who writes `<|eot_id|>` does not
    /// end a turn; default: in columns and conversations, not in plain text.
    #[semantic]
    pub sanitize_control_tokens: Option<bool>,
}

/// The fact of tokens, and of what was trained on them, that says how their prompts were made.
pub const PROMPT: &str = "prompt";

impl PromptParams {
    /// A warning where the model, or the adapter on it if there is one, was trained with other prompts.
    pub fn differs_from_training(&self, model: Option<&Facts>, adapter: Option<&Facts>, span: Span) -> Option<Problem> {
        let fact = |facts: Option<&Facts>| facts.and_then(|facts| facts.get(PROMPT)).cloned();
        let of_adapter = fact(adapter);
        // What the model's files have is asked with where nothing is said.
        let is_saved = of_adapter.is_none() && model.is_some_and(|facts| facts.contains_key(SAVED_TEMPLATE));
        let mut trained: Self = serde_json::from_value(of_adapter.or_else(|| fact(model))?).ok()?;
        if is_saved && self.chat_template.is_none() {
            trained.chat_template = None;
        }
        let keys: Vec<String> = self.differences(&trained).iter().map(|key| format!("`{key}`")).collect();
        if keys.is_empty() {
            return None;
        }
        let message = format!("the model was trained with a different {}", keys.join(", "));
        let problem = Problem::warning("prompt-differs", span, message, "asks in another way");
        Some(problem.with_help("give the same values here as in the `tokenize` stage that it was trained on"))
    }

    /// What is wrong where conversations are to be rendered, and neither these options nor the tokenizer have a chat
    /// template. `field` is the parameter that names the conversations.
    pub fn without_template(&self, tokenizer: Option<&Facts>, field: &str, span: Span) -> Option<Problem> {
        let has_none = tokenizer?.get(CHAT_TEMPLATE)? == false && self.chat_template.is_none();
        has_none.then(|| {
            let error = PromptError::NoChatTemplate;
            let help = error.help().expect("there is a way out");
            Problem::error("no-chat-template", span, error.to_string(), "conversations").with_help(help).at(field)
        })
    }

    /// What is wrong where one of the first rows has an image, a video or sound: an error where `chat_template` writes
    /// text alone, as it is when the row is rendered. Of a tokenizer's own template that is not known, and one that
    /// reads parts writes no more than their marks: a warning. `field` is the parameter that names the rows.
    pub fn with_medium(&self, rows: Option<&Facts>, field: &str, span: Span) -> Option<Problem> {
        let medium: Medium = serde_json::from_value(rows?.get(MEDIUM)?.clone()).ok()?;
        let Medium { place, turn, role, kind } = medium;
        let said = [Message { content: json!([{ "type": kind }]), ..Message::new(&role, "") }];
        let tokens = ["bos_token", "eos_token", "pad_token", "unk_token"];
        let tokens = BTreeMap::from(tokens.map(|name| (name.to_owned(), format!("<{name}>"))));
        let template = self.chat_template.as_ref().and_then(|choice| ChatTemplate::new(choice.text(), tokens).ok());
        let problem = if template.is_some_and(|template| template.spelled(&said).is_err()) {
            let error = ChatError::Part { turn, found: format!("of type `{kind}`") };
            let message = format!("{place}: {error}");
            let help = PromptError::Chat(error).help().map(str::to_owned);
            Problem::error("bad-row", span, message, "a row of these cannot be rendered").with_help_if(help)
        } else {
            let message = format!(
                "{place}: turn {turn}: its `content` has a part of type `{kind}`: images, videos and sound are not \
                 computed, and chat templates that write text alone fail over them"
            );
            let help = "leave such rows out with `filter` in the stage that makes them";
            Problem::warning("bad-row", span, message, "text alone is computed").with_help(help)
        };
        Some(problem.at(field))
    }

    /// Warnings of options that are for conversations alone, where there are none.
    pub fn without_effect(&self, conversations: bool, span: Span) -> Vec<Problem> {
        let given = [("chat_template", self.chat_template.is_some()), ("system_prompt", self.system_prompt.is_some())];
        let idle = given.into_iter().filter(|(_, given)| *given && !conversations);
        idle.map(|(key, _)| {
            let message = format!("`{key}` is for conversations, and there are none here");
            Problem::warning("no-effect", span, message, "nothing here is a conversation").at(key)
        })
        .collect()
    }

    /// The keys by which two sets of options differ, for a warning that names them.
    pub fn differences(&self, other: &Self) -> Vec<&'static str> {
        let differ = [
            ("add_bos", self.add_bos != other.add_bos),
            ("add_eos", self.add_eos != other.add_eos),
            ("chat_template", self.chat_template != other.chat_template),
            ("system_prompt", self.system_prompt != other.system_prompt),
            ("sanitize_control_tokens", self.sanitize_control_tokens != other.sanitize_control_tokens),
        ];
        differ.into_iter().filter(|(_, differ)| *differ).map(|(key, _)| key).collect()
    }
}

/// What `chat_template:` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ChatTemplateChoice(String);

impl ChatTemplateChoice {
    /// The template of a name, or one whose text is given.
    pub fn new(name_or_text: impl Into<String>) -> Self {
        Self(name_or_text.into())
    }

    /// The same of a text that a user has written: a name that is known, or Jinja that compiles.
    ///
    /// # Errors
    /// Says what is wrong with it, and what may be done.
    pub fn known(text: &str) -> Result<Self, UnknownTemplate> {
        let names = named::ALL.iter().map(|template| template.name);
        if names.clone().any(|name| name == text) {
            return Ok(Self(text.to_owned()));
        }
        if text.contains("{{") || text.contains("{%") {
            return match ChatTemplate::new(text, BTreeMap::new()) {
                Ok(_) => Ok(Self(text.to_owned())),
                Err(error) => Err(UnknownTemplate {
                    message: error.to_string(),
                    label: "a Jinja template that can be compiled is expected",
                    help: None,
                }),
            };
        }
        let names: Vec<&str> = names.collect();
        Err(UnknownTemplate {
            message: format!("there is no chat template `{text}`"),
            label: "neither a known name nor a Jinja template",
            help: suggest::help(text, "chat template", names.iter()),
        })
    }

    /// The name or text, as the file gives it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text of the template.
    pub fn text(&self) -> &str {
        self.named().map_or(&self.0, |template| template.text)
    }

    /// The template, where it has a name.
    pub fn named(&self) -> Option<&'static NamedTemplate> {
        named::find(&self.0)
    }
}

/// A text that is no chat template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}{}", help.as_ref().map_or_else(String::new, |help| format!(": {help}")))]
pub struct UnknownTemplate {
    message: String,
    /// What is wrong at its place.
    label: &'static str,
    help: Option<String>,
}

impl Parameter for ChatTemplateChoice {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let Value::String(text) = &node.value else {
            reader.wrong_type(node, "a string");
            return None;
        };
        match Self::known(text) {
            Ok(choice) => Some(choice),
            Err(UnknownTemplate { message, label, help }) => {
                let help = help.map(|help| format!("{help}\nwrite a Jinja template as a block: `chat_template: |`"));
                reader.problems.push(Problem::error("bad-value", node.span, message, label).with_help_if(help));
                None
            }
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(serde_json::to_string(self.text()).expect("a text is JSON"));
    }

    fn schema() -> Json {
        let names: Vec<&str> = named::ALL.iter().map(|template| template.name).collect();
        json!({ "type": "string", "anyOf": [{ "enum": names }, { "pattern": "\\{[{%]" }] })
    }
}

#[cfg(test)]
mod tests {
    use engine::file::problem::Severity;

    use super::*;

    fn read(json: serde_json::Value) -> Result<PromptParams, String> {
        let mut reader = Reader::default();
        let params = PromptParams::read(&Node::from_json(&json), &mut reader);
        params.ok_or_else(|| format!("{} {:?}", reader.problems[0].message, reader.problems[0].help))
    }

    #[test]
    fn a_chat_template_is_a_name_or_jinja() {
        assert_eq!(read(json!({})).unwrap(), PromptParams::default());
        assert_eq!(read(json!({"chat_template": "chatml"})).unwrap().chat_template.unwrap().text(), named::CHATML);
        let own = "{% for m in messages %}{{ m.content }}{% endfor %}";
        assert_eq!(read(json!({ "chat_template": own })).unwrap().chat_template.unwrap().text(), own);
        let error = read(json!({"chat_template": "{% for m in messages %}{{ m.content"})).unwrap_err();
        assert!(error.contains("line 1 of the template"), "{error}");
        let error = read(json!({"chat_template": "chat_ml"})).unwrap_err();
        assert!(error.contains("no chat template `chat_ml`") && error.contains("did you mean `chatml`"), "{error}");
    }

    #[test]
    fn a_model_that_is_asked_in_another_way_is_warned_of() {
        let facts = |add_bos| {
            let trained = PromptParams { add_bos: Some(add_bos), ..Default::default() };
            Facts::from_iter([(PROMPT.to_owned(), serde_json::to_value(trained).unwrap())])
        };
        let asked = PromptParams { add_bos: Some(true), ..Default::default() };
        let (alike, otherwise, unknown) = (facts(true), facts(false), Facts::new());
        let warning = |model, adapter| asked.differs_from_training(model, adapter, Span::default());
        assert!(warning(Some(&otherwise), None).unwrap().message.contains("`add_bos`"));
        assert!(warning(Some(&alike), Some(&otherwise)).is_some());
        // The adapter was trained last.
        assert_eq!(warning(Some(&otherwise), Some(&alike)), None);
        assert_eq!(warning(Some(&unknown), None), None);
    }

    #[test]
    fn a_model_that_has_the_template_it_was_trained_with_is_asked_with_it() {
        let trained = json!({ "chat_template": "alpaca" });
        let mut facts = Facts::from_iter([(PROMPT.to_owned(), trained)]);
        let own = PromptParams::default();
        let other = read(json!({"chat_template": "chatml"})).unwrap();
        assert!(own.differs_from_training(Some(&facts), None, Span::default()).is_some());
        facts.insert(SAVED_TEMPLATE.to_owned(), true.into());
        assert_eq!(own.differs_from_training(Some(&facts), None, Span::default()), None);
        assert!(other.differs_from_training(Some(&facts), None, Span::default()).is_some());
        assert!(own.differs_from_training(None, Some(&facts), Span::default()).is_some());
    }

    #[test]
    fn conversations_without_a_chat_template_are_refused() {
        let tokenizer = |has_template: bool| Facts::from_iter([(CHAT_TEMPLATE.to_owned(), has_template.into())]);
        let problem =
            |params: &PromptParams, facts: &Facts| params.without_template(Some(facts), "data", Span::default());
        let (by_default, given) = (PromptParams::default(), read(json!({"chat_template": "chatml"})).unwrap());
        let found = problem(&by_default, &tokenizer(false)).unwrap();
        assert!(found.code == "no-chat-template" && found.help.unwrap().contains("chatml"));
        assert_eq!(problem(&by_default, &tokenizer(true)), None);
        assert_eq!(problem(&given, &tokenizer(false)), None);
        // Of a result of an earlier version nothing is known.
        assert_eq!(problem(&by_default, &Facts::new()), None);
        assert_eq!(by_default.without_template(None, "data", Span::default()), None);
    }

    #[test]
    fn an_image_is_refused_by_a_template_that_writes_text_alone_and_else_warned_of() {
        let medium = json!({ "place": "`a.jsonl`, line 3", "turn": 2, "role": "user", "kind": "image_url" });
        let facts = Facts::from_iter([(MEDIUM.to_owned(), medium)]);
        let found = |with: serde_json::Value| read(with).unwrap().with_medium(Some(&facts), "data", Span::default());
        let problem = found(json!({"chat_template": "chatml"})).unwrap();
        let message = "`a.jsonl`, line 3: turn 2: its `content` has a part of type `image_url`, and the chat template writes \
                       text alone";
        assert_eq!((problem.severity, problem.message.as_str()), (Severity::Error, message));
        assert!(problem.help.unwrap().contains("`filter`"));
        let reads_parts = "{% for m in messages %}{{ bos_token + m.role }}{% if m.content is string %}{{ m.content }}{% else %}\
                           {% for part in m.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}\
                           {% endif %}{% endfor %}";
        for with in [json!({}), json!({ "chat_template": reads_parts })] {
            let problem = found(with).unwrap();
            assert!(problem.severity == Severity::Warning && problem.message.contains("`image_url`"), "{problem:?}");
        }
        let params = PromptParams::default();
        assert_eq!(params.with_medium(Some(&Facts::new()), "data", Span::default()), None);
        assert_eq!(params.with_medium(None, "data", Span::default()), None);
    }

    #[test]
    fn options_for_conversations_are_idle_without_any() {
        let params = PromptParams { system_prompt: Some("Be brief.".into()), ..Default::default() };
        assert!(params.without_effect(true, Span::default()).is_empty());
        assert!(params.without_effect(false, Span::default())[0].message.contains("`system_prompt`"));
        assert!(PromptParams::default().without_effect(false, Span::default()).is_empty());
    }

    #[test]
    fn options_that_differ_are_named() {
        let other =
            PromptParams { add_bos: Some(false), system_prompt: Some("Be brief.".into()), ..Default::default() };
        assert_eq!(PromptParams::default().differences(&other), ["add_bos", "system_prompt"]);
    }
}
