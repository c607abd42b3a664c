//! Chunks that an earlier result was made of: their tokens are read from it and not made again.

use std::collections::HashMap;

use cache::{Digest, Reusable};
use engine::context::StageContext;
use serde::{Deserialize, Serialize};

use super::counts::Counts;
use crate::data::artifact::{TableError, TokenRow, TokensReader};

/// A chunk and what became of it: rows of the result, from `first` on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Piece {
    pub identity: Digest,
    pub first: u64,
    pub rows: u64,
    pub counts: Counts,
}

/// The tokens of a chunk, and its counts.
pub(super) type Taken = (Vec<TokenRow>, Counts);

/// The chunks of earlier results.
pub(super) struct Earlier {
    results: Vec<Opened>,
    /// In which result a chunk lies, and where.
    places: HashMap<Digest, (usize, Piece)>,
}

/// A result, opened when the first of its chunks is met.
enum Opened {
    NotYet(Box<Reusable>),
    Yes(Box<TokensReader>),
    Unusable,
}

impl Earlier {
    /// The chunks of the newest results of a family.
    pub(super) fn new(context: &StageContext, family: &Digest) -> Self {
        let mut places = HashMap::new();
        let mut results = Vec::new();
        for reusable in context.reusable(family) {
            let pieces: Vec<Piece> = serde_json::from_value(reusable.pieces.clone()).unwrap_or_default();
            for piece in pieces {
                places.entry(piece.identity).or_insert((results.len(), piece));
            }
            results.push(Opened::NotYet(Box::new(Reusable { pieces: serde_json::Value::Null, ..reusable })));
        }
        Self { results, places }
    }

    /// The tokens and counts of a chunk, if an earlier result has them. One that turns out to be unreadable has none.
    pub(super) fn take(&mut self, context: &StageContext, identity: &Digest) -> Option<Taken> {
        let (result, piece) = self.places.get(identity)?;
        let opened = &mut self.results[*result];
        if let Opened::NotYet(reusable) = opened {
            let reader = context.open_reusable(reusable).and_then(|earlier| TokensReader::open(&earlier).ok());
            *opened = reader.map_or(Opened::Unusable, |reader| Opened::Yes(Box::new(reader)));
        }
        let Opened::Yes(reader) = opened else { return None };
        let rows = (piece.first..piece.first + piece.rows).map(|index| reader.row(index));
        let rows = rows.collect::<Result<Vec<_>, TableError>>().ok()?;
        Some((rows, piece.counts.clone()))
    }
}
