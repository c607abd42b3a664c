//! sacrebleu's tokenizer `13a`: that of the mteval-v13a script, for Western languages.

use crate::data::prompt::python::is_space;

/// The tokens of a text.
pub fn tokenize_13a(text: &str) -> Vec<String> {
    let mut text = text.replace("<skipped>", "").replace("-\n", "").replace('\n', " ");
    if text.contains('&') {
        text = text.replace("&quot;", "\"").replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">");
    }
    let letters: Vec<char> = format!(" {text} ").chars().collect();
    let letters = apart(&letters);
    let letters = pairs(
        &letters,
        |first, second| !first.is_ascii_digit() && is_point(second),
        |first, second| [first, ' ', second, ' '],
    );
    let letters = pairs(
        &letters,
        |first, second| is_point(first) && !second.is_ascii_digit(),
        |first, second| [' ', first, ' ', second],
    );
    let letters = pairs(
        &letters,
        |first, second| first.is_ascii_digit() && second == '-',
        |first, second| [first, ' ', second, ' '],
    );
    let text: String = letters.into_iter().collect();
    text.split(is_space).filter(|token| !token.is_empty()).map(str::to_owned).collect()
}

/// Sets punctuation apart, but for the point, the comma, the dash and the apostrophe.
fn apart(letters: &[char]) -> Vec<char> {
    let is_symbol = |letter| matches!(letter, '{'..='~' | '['..='`' | ' '..='&' | '('..='+' | ':'..='@' | '/');
    let mut result = Vec::with_capacity(letters.len() * 2);
    for letter in letters {
        if is_symbol(*letter) { result.extend([' ', *letter, ' ']) } else { result.push(*letter) }
    }
    result
}

/// Rewrites each pair of neighbours that fits, from the left; a letter is in one pair only.
fn pairs(
    letters: &[char],
    fits: impl Fn(char, char) -> bool,
    rewritten: impl Fn(char, char) -> [char; 4],
) -> Vec<char> {
    let mut result = Vec::with_capacity(letters.len() * 2);
    let mut rest = letters;
    loop {
        rest = match *rest {
            [first, second, ref rest @ ..] if fits(first, second) => {
                result.extend(rewritten(first, second));
                rest
            }
            [first, ref rest @ ..] => {
                result.push(first);
                rest
            }
            [] => return result,
        };
    }
}

fn is_point(letter: char) -> bool {
    matches!(letter, '.' | ',')
}
