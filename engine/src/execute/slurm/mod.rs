//! The Slurm executor: each stage is a job of its own, which outlives the engine that submitted it.
//!
//! What the local executor gets from a child process comes about in other ways:
//!
//! | of a child | of a job |
//! |---|---|
//! | its end and its figures, from `wait4` | the keeper on the node (`crate::execute::keeper`) is the child's parent, and leaves them in a file |
//! | its words, from a pipe | the keeper writes them into a file, which is read from where it was left |
//! | locks by inherited descriptors | the keeper takes them on its node, and the stage's process inherits them from it |
//! | death with the engine | none: a record in the home ([`record`]) says which job makes which result, and the next engine adopts it |
//! | the end of the whole group | the node's own supervisor ends what is left of a job |
//!
//! The keeper's file is the truth of how a job ended. What Slurm reports is asked for what the file cannot tell: that a
//! job waits and for what, and why it exited without reporting an error (`state.rs`). A controller that does not answer
//! says nothing about a job.

mod begin;
mod client;
mod follow;
mod follower;
mod judge;
mod queue;
pub mod record;
mod request;
mod state;
mod tail;
pub(crate) mod visible;

pub(crate) use request::gres_devices;
pub(crate) use state::field;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;

use cache::Store;
use tokio::sync::mpsc::UnboundedSender;

use super::executor::{Executor, Launch, Message, Process, StartError, Stop};
use client::Client;
use follower::{Follower, is_over, lives};
use queue::Queue;
use record::{JobRecord, Records};

/// Runs stages as jobs of a Slurm cluster.
#[derive(Debug)]
pub struct Slurm {
    client: Arc<Client>,
    queue: Arc<Queue>,
    records: Records,
    program: PathBuf,
}

impl Slurm {
    /// An executor whose jobs are recorded in a folder, and that makes jobs run this very program, which has to lie
    /// where the nodes find it under the same name.
    ///
    /// # Errors
    /// Fails where the program's own file cannot be found, such as after another build took its place.
    pub fn new(records: Records) -> Result<Self, StartError> {
        let own = std::env::current_exe().and_then(|program| program.canonicalize());
        let program = own.map_err(|source| StartError {
            action: "find the file of this very program,",
            path: std::env::current_exe().unwrap_or_default(),
            source,
        })?;
        let client = Arc::new(Client);
        Ok(Self { queue: Arc::new(Queue::new(Arc::clone(&client))), client, records, program })
    }
}

impl Slurm {
    /// Whether a job that somebody submitted is over for good. What cannot be found out is not so.
    pub(crate) fn is_over(&self, record: &JobRecord, store: &Store) -> bool {
        let details = match &record.job {
            Some(id) => self.client.details(id),
            None => self.client.named(&record.name).and_then(|ids| match ids.last() {
                Some(id) => self.client.details(id),
                None => Ok(None),
            }),
        };
        details.is_ok_and(|details| is_over(record, details.as_ref())) && !lives(store, record)
    }
}

impl Executor for Slurm {
    fn start(&self, launch: &Launch, messages: UnboundedSender<Message>) -> Result<Box<dyn Process>, StartError> {
        let (sender, orders) = mpsc::channel();
        let follower = Follower::new(self, launch, messages, orders)?;
        thread::spawn(move || follower.run());
        Ok(Box::new(Handle(sender)))
    }
}

struct Handle(mpsc::Sender<Stop>);

impl Process for Handle {
    fn stop(&self, how: Stop) {
        // One whose end was told has nobody who listens.
        let _ = self.0.send(how);
    }

    fn id(&self) -> Option<u32> {
        None
    }
}
