//! Keys of other programs that name matching cannot lead to a key of `pack`, with what to write instead.

use crate::kinds::elsewhere::with_max_seq_len;

pub(super) const KEYS: &[(&str, &str)] = with_max_seq_len![
    ("dataset", "write `tokens`: the id of a `tokenize` stage"),
    ("data", "write `tokens`: the id of a `tokenize` stage"),
];
