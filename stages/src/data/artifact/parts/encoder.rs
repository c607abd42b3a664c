//! Rows into the bytes of row groups, on the other threads of a pool while the caller makes the next rows.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use parquet::arrow::arrow_writer::{ArrowColumnChunk, ArrowColumnWriter, ArrowRowGroupWriterFactory, compute_leaves};
use parquet::errors::ParquetError;
use rayon::Yield;

/// A row group, column by column.
pub(super) type Encoded = Vec<ArrowColumnChunk>;

/// Encodes groups of rows. Their order stays.
pub(super) struct GroupEncoder {
    columns: Arc<Columns>,
    /// Those begun and not taken, the first one first.
    begun: VecDeque<Begun>,
}

/// How a group's columns are encoded.
struct Columns {
    schema: SchemaRef,
    writers: ArrowRowGroupWriterFactory,
}

type Ended = Result<Result<Encoded, ParquetError>, Box<dyn Any + Send>>;

enum Begun {
    /// On another thread, which sends it.
    Elsewhere(Receiver<Ended>),
    /// At once: the caller runs in no pool.
    Ended(Result<Encoded, ParquetError>),
}

impl GroupEncoder {
    pub(super) fn new(schema: SchemaRef, writers: ArrowRowGroupWriterFactory) -> Self {
        Self { columns: Arc::new(Columns { schema, writers }), begun: VecDeque::new() }
    }

    /// Begins a group; where the caller runs in a pool, one of its threads encodes it.
    pub(super) fn begin(&mut self, group: RecordBatch) {
        if rayon::current_thread_index().is_none() {
            self.begun.push_back(Begun::Ended(self.columns.encode(&group)));
            return;
        }
        let (columns, (sender, receiver)) = (self.columns.clone(), channel());
        rayon::spawn(move || {
            let ended = catch_unwind(AssertUnwindSafe(|| columns.encode(&group)));
            // Who failed meanwhile does not wait for it.
            let _ = sender.send(ended);
        });
        self.begun.push_back(Begun::Elsewhere(receiver));
    }

    /// How many are begun and not taken.
    pub(super) fn begun(&self) -> usize {
        self.begun.len()
    }

    /// The first of those begun, if there is one.
    pub(super) fn take(&mut self) -> Option<Result<Encoded, ParquetError>> {
        Some(match self.begun.pop_front()? {
            Begun::Ended(encoded) => encoded,
            Begun::Elsewhere(receiver) => wait(&receiver).unwrap_or_else(|panic| resume_unwind(panic)),
        })
    }
}

/// Waits on a thread of the pool, which does other work of the pool meanwhile: with one thread, this very work.
fn wait(receiver: &Receiver<Ended>) -> Ended {
    loop {
        match receiver.try_recv() {
            Ok(ended) => return ended,
            Err(TryRecvError::Disconnected) => unreachable!("the work sends what comes of it, a panic too"),
            Err(TryRecvError::Empty) => match rayon::yield_now() {
                Some(Yield::Executed) => {}
                // Nothing waits, so another thread is at it.
                Some(Yield::Idle) | None => std::thread::yield_now(),
            },
        }
    }
}

impl Columns {
    fn encode(&self, group: &RecordBatch) -> Result<Encoded, ParquetError> {
        // The number of the group matters to encrypted files alone.
        let mut writers = self.writers.create_column_writers(0)?;
        let mut leaf_writers = writers.iter_mut();
        for (field, column) in self.schema.fields().iter().zip(group.columns()) {
            for leaf in compute_leaves(field, column)? {
                leaf_writers.next().expect("each leaf has a writer").write(&leaf)?;
            }
        }
        writers.into_iter().map(ArrowColumnWriter::close).collect()
    }
}
