//! Artefacts: the kinds that stages hand to each other, and how tables of rows and tokens lie on disk.
//!
//! A table is a folder of `part-NNNNN.parquet` files and a `parts.json` that lists them. It is written and read as a
//! stream; any row can also be read by its index. Its identity covers values and declared attributes, and not how
//! Parquet holds them.

pub mod compare;
pub mod identity;
pub mod kind;
pub mod parts;
pub mod rows;
pub mod said;
pub mod tokens;

pub use compare::compare;
pub use identity::IdentityHasher;
pub use kind::{
    Adapter, CHAT_TEMPLATE_FILE, CHAT_TEMPLATES_FOLDER, Files, LogProbs, Metrics, Model, OutputKind, Packs, Rows,
    Samples, TOKENIZER_FILES, Tokenizer, Tokens, TokensOrPacks, is_tokenizer_file,
};
pub use parts::{ROWS_PER_PART, TableError, is_part_list};
pub use rows::{
    HAS_TURNS, Judged, MEDIUM, Medium, Message, Row, RowCounts, RowIdentities, RowsFacts, RowsReader, RowsWriter, Said,
    Shape, TOOLS, need_chat_template,
};
pub use tokens::{IGNORE_INDEX, OptionalColumn, Role, TokenRow, TokensFacts, TokensReader, TokensWriter};
