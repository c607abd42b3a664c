//! Keys of other programs for a key that several kinds have.

pub(super) const MAX_SEQ_LEN: &str = "write `max_seq_len`";

/// The keys of a kind with `max_seq_len`: the names that other programs have for that, and those of the kind's own
/// list. A macro, since lists that are constant cannot be joined.
macro_rules! with_max_seq_len {
    ($($own:expr,)*) => {
        &[
            ("sequence_len", $crate::kinds::elsewhere::MAX_SEQ_LEN),
            ("cutoff_len", $crate::kinds::elsewhere::MAX_SEQ_LEN),
            ("max_length", $crate::kinds::elsewhere::MAX_SEQ_LEN),
            ("max_seq_length", $crate::kinds::elsewhere::MAX_SEQ_LEN),
            ("model_max_length", $crate::kinds::elsewhere::MAX_SEQ_LEN),
            ("block_size", $crate::kinds::elsewhere::MAX_SEQ_LEN),
            $($own,)*
        ]
    };
}

pub(super) use with_max_seq_len;
