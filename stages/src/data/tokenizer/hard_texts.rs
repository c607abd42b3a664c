//! Texts over which two encoders of one tokenizer are likely to differ, if they do.

use std::collections::BTreeMap;

/// What rules for cutting texts into words tell apart, and what normalizers change.
const ATOMS: [&str; 25] = [
    "a",
    "Word",
    "ing",
    "'s",
    "'LL",
    "’t",
    "7",
    "2048",
    "٣",
    "½",
    " ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    "\u{a0}",
    "\u{3000}",
    ".",
    "!?",
    "_",
    "é",
    "e\u{301}",
    "中文",
    "한",
    "🦀\u{200d}🔬",
];

/// Texts that are no three of these.
const TEXTS: [&str; 17] = [
    "",
    "I'm we've you'll HE'D they'RE don't it’s rock'n'roll 'tis",
    "fn main() {\n\tlet x = vec![0u8; 1_000_000]; // 0x1F == 31\n\n\n    println!(\"{x:?}\");\r\n}  \n ",
    "https://example.org/a-b_c?d=%20&e[]=f#g me@example.org C:\\temp\\*.txt $12,345.67 -1e-9 3.14159265358979",
    "Привет, мир! Ελληνικά ΣΊΣΥΦΟΣ; שלום עולם مرحبا بالعالم १२३ สวัสดีครับ नमस्ते",
    "今天天气很好。我们去公园吧！「東京」は３月です。한국어도 있습니다",
    "ﬁ ﬂ Ⅷ ㎏ ℌ Å Å ẛ̣ İi ıI ſ ß ẞ ΐ ﷺ",
    "👩‍👩‍👧‍👦 🇩🇪🇫🇷 ☕️ 👍🏽 ©®™ ①②③ ∑∫√∞ ←→ ░▒▓█",
    "\u{feff}bom \u{200b}zero\u{200b}width\u{2028}line\u{2029}paragraph\u{85}next\u{ad}soft \u{202e}rtl\u{202c}",
    "\0\u{1}\u{1f}\u{7f} \u{fffd} \u{e000} \u{10ffff} \u{1f}\u{b}\u{c}",
    "     leading and trailing     ",
    "▁ ▁▁ a▁b ▁c",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "========================================----------------------------------------________________________________",
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft pneumonoultramicroscopicsilicovolcanoconiosis",
    "camelCaseHTTPServer2Go snake_case_name SCREAMING_CASE kebab-case-name x86_64 utf8 iPhone15Pro",
    "<|not_a_token|> <s> </s> <unk> [INST] [/INST] <<SYS>> <|im_start|>user\n<|endoftext|><pad> <0x0A> <0x41>",
];

/// How many tokens of a vocabulary are taken as texts.
const TOKENS: usize = 4096;

/// How many added tokens are put among other things.
const ADDED: usize = 3;

/// All of them, for a tokenizer.
pub(super) fn all(tokenizer: &tokenizers::Tokenizer) -> Vec<String> {
    let added: BTreeMap<u32, _> = tokenizer.get_added_tokens_decoder().into_iter().collect();
    let added = added.values().map(|token| token.content.as_str()).take(ADDED);
    let atoms: Vec<&str> = ATOMS.into_iter().chain(added).collect();
    let mut texts: Vec<String> = TEXTS.iter().map(|text| (*text).to_owned()).collect();
    for first in &atoms {
        for second in &atoms {
            // A pair by itself, and before every atom.
            texts.push([*first, second].concat());
            texts.push(atoms.iter().map(|third| [*first, second, third].concat()).collect());
        }
    }
    texts.extend(tokens(tokenizer));
    texts
}

/// Tokens spread over the vocabulary, as the texts that they are.
fn tokens(tokenizer: &tokenizers::Tokenizer) -> impl Iterator<Item = String> + '_ {
    let size = tokenizer.get_vocab_size(true);
    let step = size.div_ceil(TOKENS).max(1);
    (0..size as u32).step_by(step).filter_map(|id| tokenizer.decode(&[id], false).ok())
}
