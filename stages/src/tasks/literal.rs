//! Lists as Python writes them: what a template of a list gives.

use serde_json::Value;

/// The deepest list.
const DEEPEST: usize = 32;

/// The list that a text is, by `ast.literal_eval`; `None` where it is none.
pub(super) fn list(text: &str) -> Option<Vec<Value>> {
    let mut reader = Reader { rest: text.trim() };
    let value = reader.value(0)?;
    if !reader.rest.trim().is_empty() {
        return None;
    }
    match value {
        Value::Array(items) => Some(items),
        _ => None,
    }
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn skip(&mut self, expected: char) -> bool {
        let rest = self.rest.trim_start();
        let found = rest.strip_prefix(expected);
        self.rest = found.unwrap_or(rest);
        found.is_some()
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            '[' if depth < DEEPEST => {
                self.skip('[');
                let mut items = Vec::new();
                while !self.skip(']') {
                    items.push(self.value(depth + 1)?);
                    if !self.skip(',') {
                        return self.skip(']').then_some(Value::Array(items));
                    }
                }
                Some(Value::Array(items))
            }
            quote @ ('\'' | '"') => self.string(quote).map(Value::String),
            _ => self.word(),
        }
    }

    fn word(&mut self) -> Option<Value> {
        let end = self.rest.find([',', ']']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        match word.trim() {
            "None" => Some(Value::Null),
            "True" => Some(Value::Bool(true)),
            "False" => Some(Value::Bool(false)),
            number => serde_json::from_str(number).ok().filter(Value::is_number),
        }
    }

    fn string(&mut self, quote: char) -> Option<String> {
        let mut letters = self.rest[1..].char_indices();
        let mut text = String::new();
        while let Some((at, letter)) = letters.next() {
            if letter == quote {
                self.rest = &self.rest[1 + at + letter.len_utf8()..];
                return Some(text);
            }
            if letter != '\\' {
                text.push(letter);
                continue;
            }
            let mut code = |digits: usize| {
                let digits: String = letters.by_ref().take(digits).map(|(_, digit)| digit).collect();
                u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32)
            };
            match self.rest[1 + at + 1..].chars().next()? {
                'x' => {
                    code(1);
                    text.push(code(2)?);
                }
                'u' => {
                    code(1);
                    text.push(code(4)?);
                }
                'U' => {
                    code(1);
                    text.push(code(8)?);
                }
                escaped => {
                    code(1);
                    match escaped {
                        'n' => text.push('\n'),
                        't' => text.push('\t'),
                        'r' => text.push('\r'),
                        '\\' | '\'' | '"' => text.push(escaped),
                        other => text.extend(['\\', other]),
                    }
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::list;
    use serde_json::json;

    #[test]
    fn lists_of_python_are_read() {
        assert_eq!(
            list(r#"['a', "it's", 'x\n\'y\'', 1, -2.5, None, True, []]"#).unwrap(),
            [json!("a"), json!("it's"), json!("x\n'y'"), json!(1), json!(-2.5), json!(null), json!(true), json!([])]
        );
        assert_eq!(list(r"['\u00e9\x41é']").unwrap(), [json!("éAé")]);
        for text in ["[a]", "['a'", "['a'] b", "a", "['a' 'b']"] {
            assert_eq!(list(text), None, "{text}");
        }
    }
}
