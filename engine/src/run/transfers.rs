//! Transfers to a shared cache, on threads of their own: the loop sends them off and hears of each how it went.
//!
//! It leaves to others: which transfers are worth it, and what their outcomes mean (`fetch`).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use cache::remote::{Check, Pulled, Pushed, Pushing, Remote, RemoteError, RemotePlace, TransferProgress};
use cache::{Digest, ResultRecord, Store};
use tokio::sync::mpsc::UnboundedSender;

/// How many results are fetched at a time; each fetches several files at a time.
const FETCHING: usize = 2;

/// How often the loop hears how far a transfer is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

/// How an transfer went, or how far it is.
pub(super) enum TransferEvent {
    /// Whether there is a result.
    Answer { stage: usize, key: Digest, found: Result<Option<ResultRecord>, RemoteError> },
    /// How far a fetch is.
    Underway { stage: usize, progress: TransferProgress },
    /// A result is here.
    Fetched { stage: usize, key: Digest, fetched: Result<Pulled, RemoteError>, took: Duration },
    /// A result is there.
    Sent { key: Digest, sent: Result<Pushed, RemoteError>, took: Duration },
}

/// Sends transfers off. When it is dropped they are stopped, and their threads end.
pub(super) struct TransferQueue {
    questions: Sender<(usize, Digest)>,
    fetches: Sender<(usize, ResultRecord)>,
    sendings: Sender<Digest>,
    client: Arc<Client>,
}

/// The shared cache, connected to when it is first needed.
struct Client {
    place: RemotePlace,
    remote: Mutex<Connection>,
    store: Store,
    heard: UnboundedSender<TransferEvent>,
}

enum Connection {
    None,
    Open(Arc<Remote>),
    Stopped,
}

impl TransferQueue {
    /// A transfers between a store and a shared cache.
    pub(super) fn new(place: RemotePlace, store: Store, heard: UnboundedSender<TransferEvent>) -> Self {
        let client = Arc::new(Client { place, remote: Mutex::new(Connection::None), store, heard });
        let (questions, asked) = channel();
        let (fetches, to_fetch) = channel();
        let (sendings, to_send) = channel();
        work(&client, move |client| while client.ask(&asked) {});
        let to_fetch = Arc::new(Mutex::new(to_fetch));
        for _ in 0..FETCHING {
            let to_fetch = Arc::clone(&to_fetch);
            work(&client, move |client| while client.fetch(&to_fetch) {});
        }
        work(&client, move |client| while client.send(&to_send) {});
        Self { questions, fetches, sendings, client }
    }

    /// Asks whether there is a result.
    pub(super) fn ask(&self, stage: usize, key: Digest) {
        // The threads are there as long as this is.
        let _ = self.questions.send((stage, key));
    }

    pub(super) fn fetch(&self, stage: usize, record: ResultRecord) {
        let _ = self.fetches.send((stage, record));
    }

    /// Sends a result.
    pub(super) fn send(&self, key: Digest) {
        let _ = self.sendings.send(key);
    }

    /// Ends every transfer, now and from now on, with [`RemoteError::Stopped`].
    pub(super) fn stop(&self) {
        if let Connection::Open(remote) = std::mem::replace(&mut *self.client.connection(), Connection::Stopped) {
            remote.stop();
        }
    }
}

impl Drop for TransferQueue {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Client {
    /// Answers all questions that have gathered, in one go; false when there will be no more.
    fn ask(&self, asked: &Receiver<(usize, Digest)>) -> bool {
        let Ok(first) = asked.recv() else { return false };
        let questions: Vec<_> = std::iter::once(first).chain(asked.try_iter()).collect();
        let keys: Vec<Digest> = questions.iter().map(|(_, key)| *key).collect();
        let answers = self.guarded(|remote| remote.look_up(&keys));
        let mut answers = match answers {
            Ok(answers) => answers,
            // The first of them tells the loop, which then asks nothing more.
            Err(error) => {
                let rest = questions.iter().skip(1).map(|_| Err(RemoteError::Stopped));
                std::iter::once(Err(error)).chain(rest).collect()
            }
        };
        answers
            .drain(..)
            .zip(questions)
            .all(|(found, (stage, key))| self.tell(TransferEvent::Answer { stage, key, found }))
    }

    fn fetch(self: &Arc<Self>, to_fetch: &Mutex<Receiver<(usize, ResultRecord)>>) -> bool {
        let next = to_fetch.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((stage, record)) = next else { return false };
        let began = Instant::now();
        let (client, told) = (Arc::clone(self), Mutex::new(began));
        let observe = move |progress: TransferProgress| {
            let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
            if told.elapsed() >= PROGRESS_INTERVAL {
                *told = Instant::now();
                client.tell(TransferEvent::Underway { stage, progress });
            }
        };
        let fetched = self.guarded(|remote| remote.pull(&self.store, &record, observe));
        self.tell(TransferEvent::Fetched { stage, key: record.key.result_key(), fetched, took: began.elapsed() })
    }

    fn send(&self, to_send: &Receiver<Digest>) -> bool {
        let Ok(key) = to_send.recv() else { return false };
        let began = Instant::now();
        let sent = self.guarded(|remote| match self.store.take(&key)? {
            Some(record) => remote.push(&self.store, &record, Pushing::Send, Check::Length, |_| {}).map(Some),
            None => Ok(None),
        });
        let gone = || cache::StoreError::MissingTree { digest: key, path: self.store.root().to_owned() }.into();
        let sent = sent.and_then(|sent| sent.ok_or_else(gone));
        self.tell(TransferEvent::Sent { key, sent, took: began.elapsed() })
    }

    /// Does something with the remote. The loop waits for how it went; without that a defect would be a run that never
    /// ends.
    fn guarded<T>(&self, work: impl FnOnce(&Remote) -> Result<T, RemoteError>) -> Result<T, RemoteError> {
        let remote = self.remote()?;
        catch_unwind(AssertUnwindSafe(|| work(&remote))).unwrap_or_else(|_| {
            let source = std::io::Error::other("the thread that worked with it panicked");
            Err(RemoteError::Machine { remote: self.place.to_string(), source })
        })
    }

    fn remote(&self) -> Result<Arc<Remote>, RemoteError> {
        let mut connection = self.connection();
        match &*connection {
            Connection::Open(remote) => Ok(Arc::clone(remote)),
            Connection::Stopped => Err(RemoteError::Stopped),
            Connection::None => {
                let remote = Arc::new(Remote::open(&self.place)?);
                *connection = Connection::Open(Arc::clone(&remote));
                Ok(remote)
            }
        }
    }

    fn connection(&self) -> std::sync::MutexGuard<'_, Connection> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the loop; false where it has gone.
    fn tell(&self, delivery: TransferEvent) -> bool {
        self.heard.send(delivery).is_ok()
    }
}

fn work(client: &Arc<Client>, work: impl FnOnce(&Arc<Client>) + Send + 'static) {
    let client = Arc::clone(client);
    thread::spawn(move || work(&client));
}
