//! Keys of other programs that name matching cannot lead to a key of `tokenize`, with what to write instead.

pub(super) const KEYS: &[(&str, &str)] = &[
    ("sequence_len", MAX_SEQ_LEN),
    ("cutoff_len", MAX_SEQ_LEN),
    ("max_length", MAX_SEQ_LEN),
    ("max_seq_length", MAX_SEQ_LEN),
    ("model_max_length", MAX_SEQ_LEN),
    ("block_size", MAX_SEQ_LEN),
    ("truncation", "write `on_too_long: truncate`"),
    ("padding", "leave it out: rows keep their length"),
    ("packing", PACK),
    ("sample_packing", PACK),
    ("model", "write `tokenizer`: the id of the stage that makes the model"),
    ("base_model", "write `tokenizer`: the id of the stage that makes the model"),
];

const MAX_SEQ_LEN: &str = "write `max_seq_len`";
const PACK: &str = "put a `pack` stage between `tokenize` and `train`";
