//! Writes plain data as YAML documents.
//!
//! Strings are quoted where a reader of YAML 1.1 (kubectl, Argo) would take them for something else: `on`, `1e3`, `~`.

use serde_json::Value;
use serde_yaml::ser_options;

/// Documents one after the other, each behind its `---`.
pub(super) fn documents(documents: &[Value]) -> String {
    // Folded strings are harder to compare with their source.
    let options = ser_options! { folded_wrap_chars: usize::MAX };
    let document = |document| {
        let text = serde_yaml::to_string_with_options(document, options.clone());
        format!("---\n{}", text.expect("JSON values are valid YAML"))
    };
    documents.iter().map(document).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What a reader makes of one document.
    fn read(text: &str) -> Value {
        serde_yaml::from_str(text.strip_prefix("---\n").unwrap()).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    #[test]
    fn every_text_comes_back_as_it_was() {
        let texts = [
            "",
            "plain",
            "a b",
            "on",
            "Yes",
            "~",
            "null",
            "1",
            "1e3",
            "0x1f",
            "2024-01-01",
            "-",
            "- a",
            "a: b",
            "a:",
            "#",
            "a #b",
            "{{x}}",
            "'",
            "\"",
            "\\",
            "a\\nb",
            "[x]",
            "*x",
            "&x",
            "!x",
            "%x",
            "@x",
            "`x`",
            "|",
            ">",
            "?",
            "a\nb",
            "a\nb\n",
            "a\n\n",
            "a\n\n\nb\n\n",
            "\na",
            " a\nb",
            "\ta\nb",
            "a\n  b\n c",
            "a\n\tb",
            "a \nb ",
            "tab\there",
            "\r\n",
            "a\r\nb",
            "\u{7f}",
            "\u{85}",
            "\u{2028}",
            "\u{feff}x",
            "你是谁?",
            "😀",
            "a\n😀\n",
            "/pipeline/home",
            "x.y-z_1",
            "NaN",
            ".inf",
            "y",
            "{a: 1}\n{b: 2}\n",
            "---\n",
            "a\n---\nb\n",
            "# c\nversion: 1\n",
        ];
        for text in texts {
            let document = json!({ "key": text, "list": [text, { "inner": text }], "after": 1 });
            let written = documents(std::slice::from_ref(&document));
            assert_eq!(read(&written), document, "{text:?} became\n{written}");
        }
        for text in texts.iter().filter(|text| !text.is_empty()) {
            let document = json!({ *text: 1 });
            assert_eq!(read(&documents(std::slice::from_ref(&document))), document, "{text:?}");
        }
    }

    #[test]
    fn strings_that_yaml_1_1_reads_as_other_types_are_quoted() {
        for text in
            ["yes", "No", "on", "y", "true", "null", "~", "1e3", "0x1f", "0o17", "1_000", "12:30", "2024-01-01", ".inf"]
        {
            let written = documents(&[json!({ "key": text })]);
            let quoted = [format!("---\nkey: '{text}'\n"), format!("---\nkey: \"{text}\"\n")];
            assert!(quoted.contains(&written), "{written}");
        }
    }

    #[test]
    fn structure_is_written_as_people_write_it() {
        let document = json!({
            "kind": "Workflow", "empty": {}, "none": [], "number": 1.5, "truth": true, "nothing": null,
            "spec": { "list": ["a", { "name": "b", "args": ["run", "x y"] }, [1, [2]]] },
            "script": "first\n  second\n",
        });
        let written = documents(std::slice::from_ref(&document));
        assert_eq!(read(&written), document);
        let expected = "---\nkind: Workflow\nempty: {}\nnone: []\nnumber: 1.5\ntruth: true\nnothing: null\nspec:\n  list:\n  - a\n  - name: b\n    args:\n    - run\n    - x y\n  - - 1\n    - - 2\nscript: |\n  first\n    second\n";
        assert_eq!(written, expected);
    }
}
