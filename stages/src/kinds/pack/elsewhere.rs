//! Keys of other programs that name matching cannot lead to a key of `pack`, with what to write instead.

pub(super) const KEYS: &[(&str, &str)] = &[
    ("sequence_len", MAX_SEQ_LEN),
    ("cutoff_len", MAX_SEQ_LEN),
    ("max_length", MAX_SEQ_LEN),
    ("max_seq_length", MAX_SEQ_LEN),
    ("model_max_length", MAX_SEQ_LEN),
    ("block_size", MAX_SEQ_LEN),
    ("dataset", "write `tokens`: the id of a `tokenize` stage"),
    ("data", "write `tokens`: the id of a `tokenize` stage"),
];

const MAX_SEQ_LEN: &str = "write `max_seq_len`";
