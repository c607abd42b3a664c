//! `generation_config.json` of a model folder, which transformers generates by.

use std::fs;
use std::path::Path;

use engine::error::{Cause, OrFail, StageError};
use serde_json::{Map, Value, json};

use super::tokenizer::end_of_turn_ids;

const FILE: &str = "generation_config.json";

/// The tokens that end generation: an id, or a list of them.
const EOS: &str = "eos_token_id";

/// What is warned of, before why.
const UNKNOWN_ENDS: &str = "`generation_config.json` does not get the tokens that end a turn, so that transformers may \
                            generate beyond it";

/// A mark by which transformers may replace the settings by those of `config.json`: they are no longer those.
const FROM_MODEL: &str = "_from_model_config";

/// Fields of `config.json` that a new file has. transformers takes them from there where there is no file.
const OF_MODEL: [&str; 3] = ["bos_token_id", EOS, "pad_token_id"];

/// Adds the tokens that end a turn of the folder's chat templates to `eos_token_id` of its `generation_config.json`, so
/// that transformers ends generation there. The tokens that are there already stay before them; where the file names
/// none, they are those of `config.json`. The file is made where there is none. Where no token is missing, all stays as
/// it is; where the tokenizer cannot be opened, or the file is no JSON object, it does too, and `warn` gets why.
///
/// # Errors
/// Fails if the disk refuses.
pub(crate) fn end_at_turns(folder: &Path, warn: impl FnOnce(String)) -> Result<(), StageError> {
    let ends = match end_of_turn_ids(folder) {
        Ok(ends) if ends.is_empty() => return Ok(()),
        Ok(ends) => ends,
        Err(why) => {
            warn(format!("{UNKNOWN_ENDS}: {why}"));
            return Ok(());
        }
    };
    let path = folder.join(FILE);
    let model = object(&folder.join("config.json")).unwrap_or_default();
    let settings = if path.exists() { object(&path) } else { Some(of_model(&model)) };
    let Some(mut settings) = settings else {
        warn(format!("{UNKNOWN_ENDS}: the file is no JSON object"));
        return Ok(());
    };
    let before = ids(&settings).or_else(|| ids(&of_model(&model))).unwrap_or_default();
    let mut after = before.clone();
    for id in ends.into_iter().map(u64::from) {
        if !after.contains(&id) {
            after.push(id);
        }
    }
    if after == before {
        return Ok(());
    }
    let eos = if let [one] = after[..] { json!(one) } else { json!(after) };
    settings.insert(EOS.to_owned(), eos);
    settings.retain(|name, _| name != FROM_MODEL);
    fs::write(&path, format!("{:#}\n", Value::Object(settings)))
        .or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))
}

/// The object in a file, if there is one.
fn object(path: &Path) -> Option<Map<String, Value>> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// What a new file has of a `config.json`; that of a model of several parts has it in the part for text.
fn of_model(model: &Map<String, Value>) -> Map<String, Value> {
    let of_text = model.get("text_config").and_then(Value::as_object);
    let field = |name: &str| model.get(name).or_else(|| of_text?.get(name)).filter(|id| !id.is_null());
    OF_MODEL.into_iter().filter_map(|name| Some((name.to_owned(), field(name)?.clone()))).collect()
}

/// The tokens that end generation, if any is named.
fn ids(fields: &Map<String, Value>) -> Option<Vec<u64>> {
    let ids: Vec<u64> = match fields.get(EOS)? {
        Value::Array(several) => several.iter().filter_map(Value::as_u64).collect(),
        one => one.as_u64().into_iter().collect(),
    };
    (!ids.is_empty()).then_some(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: (&str, &str) =
        ("config.json", r#"{"bos_token_id": 0, "hidden_size": 8, "eos_token_id": 1, "pad_token_id": null}"#);

    /// The file of a folder with these files and a tokenizer, whose end of text is 1. Its chat template ends turns with
    /// 4, `<|eot_id|>`, unless another one is among the files.
    fn ended(files: &[(&str, &str)]) -> Option<String> {
        made(files).0
    }

    /// The same, and what is warned of.
    fn made(files: &[(&str, &str)]) -> (Option<String>, Option<String>) {
        let folder = tempfile::tempdir().unwrap();
        let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers/bytelevel"));
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(golden.join(name), folder.path().join(name)).unwrap();
        }
        fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
        files.iter().for_each(|(name, text)| fs::write(folder.path().join(name), text).unwrap());
        let mut warning = None;
        end_at_turns(folder.path(), |text| warning = Some(text)).unwrap();
        (fs::read_to_string(folder.path().join(FILE)).ok(), warning)
    }

    /// A chat template that ends turns so.
    fn template(end: &str) -> String {
        format!(
            "{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.content }}}}{end}{{% endfor %}}\
             {{% if add_generation_prompt %}}<assistant>{{% endif %}}"
        )
    }

    #[test]
    fn the_end_of_a_turn_is_added_to_the_tokens_that_are_there() {
        let made = "{\n  \"bos_token_id\": 0,\n  \"eos_token_id\": [\n    1,\n    4\n  ]\n}\n";
        assert_eq!(ended(&[CONFIG]).as_deref(), Some(made));
        let written = |settings: &str, expected: &str| {
            let written: Value = serde_json::from_str(&ended(&[CONFIG, (FILE, settings)]).unwrap()).unwrap();
            assert_eq!(written.to_string(), expected);
        };
        let settings = r#"{"temperature": 0.6, "eos_token_id": [7, 1], "top_p": 0.9}"#;
        written(settings, r#"{"temperature":0.6,"eos_token_id":[7,1,4],"top_p":0.9}"#);
        written(r#"{"eos_token_id": 2, "top_p": 1.0}"#, r#"{"eos_token_id":[2,4],"top_p":1.0}"#);
        written(r#"{"_from_model_config": true, "eos_token_id": 1}"#, r#"{"eos_token_id":[1,4]}"#);
        written(r#"{"eos_token_id": [2, null]}"#, r#"{"eos_token_id":[2,4]}"#);
        written(r#"{"eos_token_id": []}"#, r#"{"eos_token_id":[1,4]}"#);
        let of_parts = ("config.json", r#"{"text_config": {"eos_token_id": 1}}"#);
        assert_eq!(ended(&[of_parts]).as_deref(), Some("{\n  \"eos_token_id\": [\n    1,\n    4\n  ]\n}\n"));
        written(r#"{"do_sample": true}"#, r#"{"do_sample":true,"eos_token_id":[1,4]}"#);
        assert_eq!(ended(&[("config.json", "{}")]).as_deref(), Some("{\n  \"eos_token_id\": 4\n}\n"));
    }

    #[test]
    fn a_file_that_lacks_no_token_stays_as_it_is() {
        for settings in [r#"{ "eos_token_id":[ 4,1 ] }"#, r#"{"eos_token_id":4}"#, "no JSON", "[4]"] {
            assert_eq!(ended(&[CONFIG, (FILE, settings)]).as_deref(), Some(settings));
        }
        assert_eq!(ended(&[("config.json", r#"{"eos_token_id": [1, 4]}"#)]), None);
    }

    #[test]
    fn what_cannot_be_read_is_warned_of() {
        let template = ("chat_template.jinja", "{% for");
        for (file, why) in [
            (template, "the chat template cannot be used: the chat template cannot be read: "),
            (("tokenizer.json", "{}"), "cannot understand `tokenizer.json`: "),
            (("tokenizer_config.json", "[]"), "cannot understand `tokenizer_config.json`: "),
            ((FILE, "no JSON"), "the file is no JSON object"),
        ] {
            let (written, warning) = made(&[CONFIG, file]);
            let warning = warning.unwrap_or_default();
            assert!(warning.contains(&format!("generate beyond it: {why}")), "{file:?}: {warning}");
            assert_eq!(written.as_deref(), (file.0 == FILE).then_some("no JSON"));
        }
        // Without a chat template no turn ends.
        let unread = [("tokenizer_config.json", "{}"), ("tokenizer.json", "{}"), (FILE, "no JSON")];
        for fine in [&[CONFIG][..], &[CONFIG, (FILE, "{}")], &unread] {
            assert_eq!(made(fine).1, None, "{fine:?}");
        }
    }

    /// The end of a turn that is no token, or the end of text, adds none; a template of tools may have another one.
    #[test]
    fn the_chat_templates_of_the_folder_tell_it() {
        let eos = |files: &[(&str, &str)]| {
            let text = ended(&[&[CONFIG], files].concat())?;
            Some(serde_json::from_str::<Value>(&text).unwrap()[EOS].to_string())
        };
        let default = "chat_template.jinja";
        for end in [";", "###\n", "", ";<|eot_id|>", "<|end_of_text|>\n", "{{ eos_token }}"] {
            assert_eq!(eos(&[(default, template(end).as_str())]), None, "{end:?}");
        }
        for end in ["<|eot_id|>", "\n<|eot_id|>\n\n", "<|eot_id|>{{ eos_token }}"] {
            assert_eq!(eos(&[(default, template(end).as_str())]).as_deref(), Some("[1,4]"), "{end:?}");
        }
        let tool_use = "additional_chat_templates/tool_use.jinja";
        let [turn, header] = ["<|eot_id|>", "<|end_header_id|>"].map(template);
        assert_eq!(eos(&[(default, &turn), (tool_use, &header)]).as_deref(), Some("[1,4,3]"));
        assert_eq!(eos(&[(default, &turn), (tool_use, &turn)]).as_deref(), Some("[1,4]"));
        // Folders whose tokenizer or template cannot be read are written as before.
        assert_eq!(eos(&[(default, "{% for")]), None);
        assert_eq!(eos(&[("tokenizer.json", "{}")]), None);
    }
}
