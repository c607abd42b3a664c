//! The embedding and the output projection, which of a tied model are one matrix, unless an adapter has a copy of one
//! of them.

use crate::adapter::{EmbeddingRows, Projection, TokenRows};
use crate::ops::{Ops, Result, WeightRole};
use crate::parameter::{Matrix, MatrixCopy, Parameter};
use crate::peft::targets::HEAD;
use crate::peft::{SavedTensor, saved_tensor_name};

/// The embedding and the output projection.
#[expect(clippy::large_enum_variant, reason = "one per decoder")]
pub(super) enum Embeddings<B: Ops> {
    /// One matrix is both. An adapter on the output, or a copy of one of the two, leaves the other as it is: in effect,
    /// unties them.
    Tied {
        /// The output projection, with the embedding as its matrix.
        shared: Projection<B>,
        /// An adapter's copy of the embedding.
        table: Option<Matrix<B>>,
        /// An adapter's copy of the output projection.
        head: Option<Projection<B>>,
    },
    /// Each has its own.
    Untied {
        /// The embedding.
        embed_tokens: Matrix<B>,
        /// Rows of it that are trained by themselves.
        rows: Option<EmbeddingRows<B>>,
        /// The output projection.
        lm_head: Projection<B>,
    },
}

/// An adapter's copies of the matrix of a tied model, or its rows of an embedding that is not the head.
pub(super) struct Copies<B: Ops> {
    table: Option<Matrix<B>>,
    head: Option<Projection<B>>,
    rows: Option<EmbeddingRows<B>>,
}

impl<B: Ops> Copies<B> {
    pub(super) const NONE: Self = Self { table: None, head: None, rows: None };
}

impl<B: Ops> Embeddings<B> {
    /// One matrix for both. The trained values keep the name that they have in a checkpoint.
    pub(super) fn tied(mut embed_tokens: Matrix<B>) -> Self {
        // A projection is known by its matrix.
        embed_tokens.name = format!("{HEAD}.weight");
        let shared = Projection::new(embed_tokens, None);
        Self::Tied { shared, table: None, head: None }
    }

    pub(super) fn embed_tokens(&self) -> &Matrix<B> {
        match self {
            Self::Tied { shared, table, .. } => table.as_ref().unwrap_or(&shared.matrix),
            Self::Untied { embed_tokens, .. } => embed_tokens,
        }
    }

    pub(super) fn embed_tokens_mut(&mut self) -> &mut Matrix<B> {
        match self {
            Self::Tied { shared, table, .. } => table.as_mut().unwrap_or(&mut shared.matrix),
            Self::Untied { embed_tokens, .. } => embed_tokens,
        }
    }

    pub(super) fn output(&self) -> &Projection<B> {
        match self {
            Self::Tied { shared, head, .. } => head.as_ref().unwrap_or(shared),
            Self::Untied { lm_head, .. } => lm_head,
        }
    }

    pub(super) fn output_mut(&mut self) -> &mut Projection<B> {
        match self {
            Self::Tied { shared, head, .. } => head.as_mut().unwrap_or(shared),
            Self::Untied { lm_head, .. } => lm_head,
        }
    }

    /// The output's parameters, without those of a matrix that is the embedding's.
    pub(super) fn output_parameters(&self) -> impl Iterator<Item = &Parameter<B>> {
        self.output().parameters().skip(usize::from(self.is_shared() && self.embed_tokens().trained.is_some()))
    }

    /// Whether one matrix is currently both.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Self::Tied { table: None, head: None, .. })
    }

    /// The rows of the embedding that have values of their own, and these.
    pub(super) fn rows(&self) -> Option<(&TokenRows<B>, &Parameter<B>)> {
        match self {
            Self::Tied { shared, .. } => shared.lora.as_ref().and_then(|lora| Some((lora.rows.as_ref()?, &lora.a))),
            Self::Untied { rows, .. } => rows.as_ref().map(|of| (&of.rows, &of.values)),
        }
    }

    /// As [`Embeddings::rows`], to change the values.
    pub(super) fn rows_mut(&mut self) -> Option<(&TokenRows<B>, &mut Parameter<B>)> {
        match self {
            Self::Tied { shared, .. } => shared.lora.as_mut().and_then(|lora| Some((lora.rows.as_ref()?, &mut lora.a))),
            Self::Untied { rows, .. } => rows.as_mut().map(|of| (&of.rows, &mut of.values)),
        }
    }

    /// Gives rows of an embedding that is not the head values of their own.
    pub(super) fn put_rows(&mut self, of_embedding: EmbeddingRows<B>) {
        match self {
            Self::Tied { .. } => unreachable!("the rows of a tied model are its head's"),
            Self::Untied { rows, .. } => *rows = Some(of_embedding),
        }
    }

    /// The values of such rows: those of a tied model are among the output's.
    pub(super) fn values_of_rows(&self) -> Option<&Parameter<B>> {
        match self {
            Self::Tied { .. } => None,
            Self::Untied { rows, .. } => rows.as_ref().map(|of| &of.values),
        }
    }

    /// Prepares what follows from such values again.
    pub(super) fn refresh_rows(&mut self, ops: &B) -> Result {
        match self {
            Self::Untied { rows: Some(EmbeddingRows { values, rows }), .. } => rows.refresh(ops, &values.value),
            Self::Untied { rows: None, .. } | Self::Tied { .. } => Ok(()),
        }
    }

    /// The embedding's values, where they are kept, and those of its rows; and the output's parameters without them.
    pub(super) fn parameters_mut(&mut self) -> (Vec<&mut Parameter<B>>, Vec<&mut Parameter<B>>) {
        match self {
            Self::Tied { shared, table: None, head: None } => {
                let Projection { matrix, bias, lora, .. } = shared;
                let lora = lora.iter_mut().flat_map(crate::adapter::Lora::parameters_mut);
                (matrix.trained.iter_mut().collect(), bias.iter_mut().chain(lora).collect())
            }
            Self::Tied { shared, table, head } => match (table, head) {
                (Some(table), None) => (table.trained.iter_mut().collect(), shared.parameters_mut().collect()),
                (Some(table), Some(head)) => (table.trained.iter_mut().collect(), head.parameters_mut().collect()),
                (None, Some(head)) => (shared.matrix.trained.iter_mut().collect(), head.parameters_mut().collect()),
                (None, None) => unreachable!("matched above"),
            },
            Self::Untied { embed_tokens, rows, lm_head } => {
                let of_rows = rows.iter_mut().map(|of| &mut of.values);
                (embed_tokens.trained.iter_mut().chain(of_rows).collect(), lm_head.parameters_mut().collect())
            }
        }
    }

    /// The base model's own matrix of the embedding, and of the output.
    pub(super) fn base(&self) -> (&Matrix<B>, &Matrix<B>) {
        match self {
            Self::Tied { shared, .. } => (&shared.matrix, &shared.matrix),
            Self::Untied { embed_tokens, lm_head, .. } => (embed_tokens, &lm_head.matrix),
        }
    }

    /// The matrix of a tied model where neither of its uses is left: an adapter has a copy for each.
    pub(super) fn hidden_by_copies(&self) -> Option<&Matrix<B>> {
        match self {
            Self::Tied { shared, table: Some(_), head: Some(_) } => Some(&shared.matrix),
            Self::Tied { .. } | Self::Untied { .. } => None,
        }
    }

    /// Puts an adapter's copy in the place of the embedding.
    pub(super) fn replace_embedding(&mut self, copy: Matrix<B>) {
        match self {
            Self::Tied { table, .. } => *table = Some(copy),
            Self::Untied { embed_tokens, .. } => embed_tokens.replace_by(copy),
        }
    }

    /// Puts an adapter's copy in the place of the output's matrix.
    pub(super) fn replace_output(&mut self, copy: Matrix<B>) {
        match self {
            Self::Tied { head, .. } => *head = Some(Projection::new(copy, None)),
            Self::Untied { lm_head, .. } => lm_head.matrix.replace_by(copy),
        }
    }

    /// Exchanges an adapter's copies, but for that of an untied output, and the base model's own, which are then in the
    /// other's place: in `aside` where a tied model has no other for them.
    pub(super) fn exchange(&mut self, aside: &mut Copies<B>) {
        match self {
            Self::Tied { table, head, .. } => {
                std::mem::swap(table, &mut aside.table);
                std::mem::swap(head, &mut aside.head);
            }
            Self::Untied { embed_tokens, rows, .. } => {
                embed_tokens.exchange();
                std::mem::swap(rows, &mut aside.rows);
            }
        }
    }

    /// Takes an adapter's copies away, but for that of an untied output, and puts the base model's own in their places.
    pub(super) fn take_copies(&mut self) -> (Option<MatrixCopy<B>>, Copies<B>) {
        match self {
            Self::Tied { table, head, .. } => (None, Copies { table: table.take(), head: head.take(), rows: None }),
            Self::Untied { embed_tokens, rows, .. } => {
                (embed_tokens.take_copy(), Copies { rows: rows.take(), ..Copies::NONE })
            }
        }
    }

    /// Puts copies back that [`Embeddings::take_copies`] took away.
    pub(super) fn put_copies(&mut self, copy: Option<MatrixCopy<B>>, copies: Copies<B>) {
        match self {
            Self::Tied { table, head, .. } => (*table, *head) = (copies.table, copies.head),
            Self::Untied { embed_tokens, rows, .. } => {
                copy.into_iter().for_each(|copy| embed_tokens.put_copy(copy));
                *rows = copies.rows;
            }
        }
    }

    /// Puts the base model's own matrices back in their places.
    pub(super) fn give_back(&mut self) {
        match self {
            Self::Tied { table, head, .. } => (*table, *head) = (None, None),
            Self::Untied { embed_tokens, rows, lm_head } => {
                embed_tokens.give_back();
                *rows = None;
                lm_head.matrix.give_back();
            }
        }
    }
}

/// An adapter's copy of a matrix of the base, trainable under PEFT's name for it.
pub(super) fn copy_of_matrix<B: Ops>(ops: &B, base: &Matrix<B>, name: &str, copy: &SavedTensor) -> Result<Matrix<B>> {
    let shape = [base.out_features, base.in_features];
    let mut matrix = Matrix::trainable(ops, name, shape, WeightRole::Table, &copy.values)?;
    if let Some(trained) = &mut matrix.trained {
        trained.name = saved_tensor_name(name);
    }
    Ok(matrix)
}
