//! The chat templates of a tokenizer, and which of them a conversation is rendered by.

use std::collections::BTreeMap;
use std::iter;

use super::chat::{ChatError, ChatTemplate};
use crate::data::artifact::{Message, TOOLS};

/// The chat templates of a tokenizer: one for all conversations, or a second one for those with tools. transformers
/// calls them `default` and `tool_use`.
///
/// Who has a conversation chooses once, by [`ChatTemplates::of`], and asks everything of that template. Who has none at
/// hand, since the question is about a whole stage, says which ones are meant: [`ChatTemplates::without_tools`] where
/// no conversation has tools, else [`ChatTemplates::all`].
pub struct ChatTemplates {
    default: ChatTemplate,
    /// That of conversations with tools, where it is another one. A mistake in it counts where it is used.
    tool_use: Option<Result<ChatTemplate, ChatError>>,
}

impl ChatTemplates {
    /// Compiles the default template, and `tool_use` where there is one; `special_tokens` are those of
    /// [`ChatTemplate::new`].
    ///
    /// # Errors
    /// Fails where the default one is no template.
    pub fn new(
        default: &str,
        tool_use: Option<&str>,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self, ChatError> {
        let tool_use = tool_use.map(|source| ChatTemplate::new(source, special_tokens.clone()));
        Ok(Self { default: ChatTemplate::new(default, special_tokens)?, tool_use })
    }

    /// The template of a conversation.
    ///
    /// # Errors
    /// Fails where it is one with a mistake.
    pub fn of(&self, messages: &[Message]) -> Result<&ChatTemplate, ChatError> {
        match has_tools(messages) {
            true => self.with_tools(),
            false => Ok(self.without_tools()),
        }
    }

    /// That of conversations without tools.
    pub fn without_tools(&self) -> &ChatTemplate {
        &self.default
    }

    /// That of conversations with tools.
    ///
    /// # Errors
    /// As for [`ChatTemplates::of`].
    pub fn with_tools(&self) -> Result<&ChatTemplate, ChatError> {
        match &self.tool_use {
            None => Ok(&self.default),
            Some(Ok(template)) => Ok(template),
            Some(Err(error)) => Err(ChatError::ToolUse(error.to_string())),
        }
    }

    /// Those that may be used, the default one first; one with a mistake is left out.
    pub fn all(&self) -> impl Iterator<Item = &ChatTemplate> {
        iter::once(&self.default).chain(self.tool_use.iter().flatten())
    }

    /// What a sentence begins with about each of them of which something holds.
    pub(super) fn subjects(&self, holds: impl Fn(&ChatTemplate) -> bool) -> Vec<&'static str> {
        let subjects = ["the chat template", "in conversations with tools, the chat template `tool_use`"];
        let told = subjects.into_iter().zip(self.all()).filter(|(_, template)| holds(template));
        told.map(|(subject, _)| subject).collect()
    }
}

/// Whether a conversation has tools, so that it is rendered by the template of those.
pub(super) fn has_tools(messages: &[Message]) -> bool {
    messages.first().and_then(|first| first.other.get(TOOLS)).is_some_and(|tools| !tools.is_null())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::super::params::PromptParams;
    use super::super::render::{PromptRenderer, Prompter};
    use super::super::train_on::TrainOn;
    use super::*;
    use crate::data::artifact::{Row, RowsFacts};
    use crate::data::tokenizer::Tokenizer;

    fn templates(default: &str, tool_use: &str) -> ChatTemplates {
        ChatTemplates::new(default, Some(tool_use), BTreeMap::new()).unwrap()
    }

    /// A template with these letters around a role, and an assistant's turn as `said` writes it.
    fn turns(begin: &str, end: &str, said: &str) -> String {
        format!(
            "{{% for m in messages %}}{begin}{{{{ m.role }}}}{end}{{% if m.role == 'assistant' %}}{said}{{% else %}}\
             {{{{ m.content }}}};{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{begin}assistant{end}{{% endif %}}"
        )
    }

    fn tool() -> Value {
        json!([{ "type": "function", "function": { "name": "weather", "parameters": {} } }])
    }

    /// As transformers renders them, which takes the template `tool_use` where there are tools.
    #[test]
    fn conversations_with_tools_have_a_template_of_their_own() {
        let tool_use = turns("[", "]", "{% generation %}{{ m.content }};{% endgeneration %}");
        let templates = templates(&turns("<", ">", "{{ m.content }}|"), &format!("{{{{ tools|tojson }}}}{tool_use}"));
        let mut messages = [Message::new("user", "Rain?"), Message::new("assistant", "No.")];
        let rendered = |messages: &[Message], asks| templates.of(messages).unwrap().render(messages, asks).unwrap();
        let pieces_of = |messages: &[Message]| {
            let turns = templates.of(messages).unwrap().turns(messages, TrainOn::Assistant).unwrap();
            turns.into_iter().map(|turn| (turn.text, turn.learn)).collect::<Vec<_>>()
        };
        let piece = |text: &str, learn| (text.to_owned(), learn);
        let plain = "<user>Rain?;<assistant>";
        assert_eq!(rendered(&messages[..1], true), plain);
        assert_eq!(pieces_of(&messages), [piece(plain, false), piece("No.|", true)]);
        messages[0].other.insert(TOOLS.to_owned(), json!([]));
        assert_eq!(rendered(&messages, false), "[][user]Rain?;[assistant]No.;");
        messages[0].other.insert(TOOLS.to_owned(), tool());
        let with_tools = "[{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"parameters\": {}}}]\
                          [user]Rain?;[assistant]";
        assert_eq!(rendered(&messages[..1], true), with_tools);
        assert_eq!(pieces_of(&messages), [piece(with_tools, false), piece("No.;", true)]);
        let template = templates.of(&messages).unwrap();
        let asked = template.asked(&messages[..1]).unwrap();
        assert!(asked.len() == 1 && asked[0].text == with_tools && !asked[0].learn, "{asked:?}");
        assert_eq!(template.answer_to(with_tools, &messages).unwrap().as_deref(), Some("No."));
        // The default template would leave the tools out.
        assert!(template.check(&messages).is_ok());
        assert!(matches!(templates.without_tools().check(&messages), Err(ChatError::Tools)));
    }

    #[test]
    fn a_mistake_in_the_template_of_tools_counts_where_there_are_tools() {
        let templates = templates("{{ messages[0].content }}", "{% for");
        let mut messages = [Message::new("user", "x")];
        assert_eq!(templates.of(&messages).unwrap().render(&messages, false).unwrap(), "x");
        assert_eq!(templates.all().count(), 1);
        messages[0].other.insert(TOOLS.to_owned(), json!([]));
        let Err(error) = templates.of(&messages) else { panic!("its template has a mistake") };
        assert!(matches!(error, ChatError::ToolUse(_)) && error.to_string().contains("line 1"), "{error}");
    }

    /// What a stage asks where it does not know yet which conversations it has: what holds of either template.
    #[test]
    fn a_stage_ends_completions_where_either_template_ends_turns() {
        let folder = tempfile::tempdir().unwrap();
        let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers/bytelevel"));
        std::fs::copy(golden.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        let plain = turns("<", ">", "{{ m.content }}###");
        let reasons = "{% if m.reasoning_content %}{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}!!!";
        let with_tools = format!("{{{{ tools|tojson }}}}{}", turns("[", "]", reasons));
        let opened = |tool_use: &str| {
            let named = |name: &str, template: &str| json!({ "name": name, "template": template });
            let config = json!({ "chat_template": [named("default", &plain), named("tool_use", tool_use)] });
            std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
            Tokenizer::from_folder(folder.path()).unwrap()
        };
        let renderer_of = |tokenizer: &Tokenizer, facts: &RowsFacts| {
            PromptRenderer::new(&PromptParams::default(), facts, tokenizer).unwrap()
        };
        let tokenizer = opened(&with_tools);
        let renderer = renderer_of(&tokenizer, &RowsFacts::messages());
        assert_eq!(renderer.stop_texts(&tokenizer), ["###", "!!!"]);
        assert_eq!(renderer.end_of_reasoning(), Some("</think>"));
        assert!(renderer_of(&tokenizer, &RowsFacts::text()).stop_texts(&tokenizer).is_empty());
        // Of one conversation its own template says it.
        let prompter = Prompter::new(&PromptParams::default(), &tokenizer).unwrap();
        let mut messages = vec![Message::new("user", "Rain?")];
        let stop_texts = prompter.stop_texts(&tokenizer);
        assert_eq!(stop_texts.of(&messages), Some("###"));
        assert_eq!(renderer.end_of_reasoning_in(&Row::Messages(messages.clone())), None);
        messages[0].other.insert(TOOLS.to_owned(), tool());
        assert_eq!(stop_texts.of(&messages), Some("!!!"));
        assert_eq!(renderer.end_of_reasoning_in(&Row::Messages(messages)), Some("</think>"));
        // What both say is said once, and a template with a mistake ends nothing.
        for tool_use in [plain.as_str(), "{% for"] {
            let tokenizer = opened(tool_use);
            assert_eq!(renderer_of(&tokenizer, &RowsFacts::messages()).stop_texts(&tokenizer), ["###"], "{tool_use}");
        }
        // A warning says which one it is about, and there is one for each.
        let open = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if not loop.last %};{% endif %}{% endfor %}\
                    {% if add_generation_prompt %};[assistant]{% endif %}";
        let renderer = renderer_of(&opened(open), &RowsFacts::messages());
        let of_tools = "in conversations with tools, the chat template `tool_use`";
        assert_eq!(renderer.leaves_the_end_open(), [of_tools]);
        assert_eq!(renderer.learns_headers(), [""; 0]);
        let both = templates(open, open);
        assert_eq!(both.subjects(ChatTemplate::leaves_the_end_open), ["the chat template", of_tools]);
    }
}
