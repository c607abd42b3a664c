//! Keys of other programs that name matching cannot lead to a key of `tokenize`, with what to write instead.

use crate::kinds::elsewhere::with_max_seq_len;

pub(super) const KEYS: &[(&str, &str)] = with_max_seq_len![
    ("truncation", "write `on_too_long: truncate`"),
    ("padding", "leave it out: rows keep their length"),
    ("packing", PACK),
    ("sample_packing", PACK),
    ("model", "write `tokenizer`: the id of the stage that makes the model"),
    ("base_model", "write `tokenizer`: the id of the stage that makes the model"),
];

const PACK: &str = "put a `pack` stage between `tokenize` and `train`";
