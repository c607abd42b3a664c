//! Removing what was chosen, and then what no result holds: results, trees, objects, in this order and in short batches
//! behind the gate.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use super::policy::{Because, Choice, Now, Policy};
use crate::atomic::flush_folder;
use crate::census::{Census, CountedPartial, CountedResult};
use crate::entry::remove_entry;
use crate::in_use::Closed;
use crate::listing::changed;
use crate::{Digest, Lock, Store, StoreError, lock};

/// How long others wait at the gate at most, but for the removal of one large file.
const BATCH: Duration = Duration::from_millis(10);

/// How long the gate then stays open.
const PAUSE: Duration = Duration::from_millis(1);

/// Whether anything is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    Real,
    /// It is only said what would be.
    DryRun,
}

/// What was removed, or would be.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Collected {
    /// Results, in the order of removal.
    pub results: Vec<RemovedResult>,
    /// Working state.
    pub partials: Vec<RemovedPartial>,
    pub trees: usize,
    pub objects: usize,
    /// The length of the objects and the working state that are gone.
    pub freed_bytes: u64,
    /// What objects and working state take now.
    pub left_bytes: u64,
    /// Results over a limit that stay, since they are pinned.
    pub pinned: usize,
    /// Results over a limit that stay, since a process uses them.
    pub in_use: usize,
    /// Objects of no result that stay, since they are younger than [`Policy::grace`].
    pub young_objects: usize,
    /// Their length.
    pub young_bytes: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RemovedResult {
    pub key: Digest,
    /// The kind of stage that made it.
    pub kind: String,
    /// The length of its files, which other results may still hold.
    pub bytes: u64,
    /// How long making it took, where that is known.
    pub seconds: Option<f64>,
    /// When it was last used.
    pub last_use: SystemTime,
    /// Why it went.
    pub because: Because,
}

/// Working state that was removed.
#[derive(Debug, Clone, PartialEq)]
pub struct RemovedPartial {
    /// The working key.
    pub key: Digest,
    /// Its length.
    pub bytes: u64,
    /// When it was last written.
    pub written: SystemTime,
}

impl Store {
    /// Removes what a policy lets go, and what no result holds. Safe beside processes that use the store.
    ///
    /// # Errors
    /// Fails where something cannot be read or removed; what was removed by then is garbage all the same.
    pub fn collect_garbage(&self, policy: &Policy, removal: Removal) -> Result<Collected, StoreError> {
        self.collect(policy, removal, Policy::choose)
    }

    /// Removes these results, and what no result holds then. One that is in use stays, and is counted.
    ///
    /// # Errors
    /// As [`Store::collect_garbage`].
    pub fn remove_results(&self, keys: &BTreeSet<Digest>, removal: Removal) -> Result<Collected, StoreError> {
        self.collect(&Policy::default(), removal, |_, census, now| Policy::choose_these(census, keys, now))
    }

    fn collect(
        &self,
        policy: &Policy,
        removal: Removal,
        choose: impl Fn(&Policy, &Census, Now) -> Choice,
    ) -> Result<Collected, StoreError> {
        // Two at once would each count what the other removes.
        let _alone = match removal {
            Removal::Real => Some(self.lock("gc")?),
            Removal::DryRun => None,
        };
        if removal == Removal::Real {
            self.ensure_folders()?;
            lock::sweep(&self.folder("staging"))?;
        }
        let linked = self.linked_trees(removal)?;
        let mut policy = policy.clone();
        let census = self.census()?;
        let is_linked = |result: &&CountedResult| !result.trees.is_disjoint(&linked);
        policy.pinned.extend(census.results.iter().filter(is_linked).map(|result| result.key));
        let now = Now { now: self.now(), in_use_since: self.in_use_since()? };
        let choice = choose(&policy, &census, now);
        let mut collecting = Collecting::new(self, &policy, &census, now);
        collecting.linked = linked;
        collecting.done.pinned = choice.pinned;
        collecting.done.in_use = choice.in_use;
        match removal {
            Removal::Real => collecting.remove(&choice)?,
            Removal::DryRun => collecting.pretend(&choice)?,
        }
        let mut done = collecting.done;
        done.left_bytes = census.bytes().saturating_sub(done.freed_bytes);
        Ok(done)
    }

    /// The present; no earlier than what the file system's own clock, which may be ahead of this machine's, has said.
    fn now(&self) -> SystemTime {
        self.user_since().map_or_else(SystemTime::now, |since| since.max(SystemTime::now()))
    }
}

struct Collecting<'a> {
    store: &'a Store,
    policy: &'a Policy,
    census: &'a Census,
    now: Now,
    /// Trees that results named which are gone, and their objects: garbage of known age.
    released: BTreeSet<Digest>,
    /// Trees whose objects links outside of the store lead to.
    linked: BTreeSet<Digest>,
    done: Collected,
}

/// A file that nobody needs, if it is still the one that was seen.
struct Candidate {
    path: PathBuf,
    bytes: u64,
}

/// The trees that no result names.
#[derive(Default)]
struct Unnamed {
    /// Those that may go.
    garbage: Vec<Candidate>,
    /// The objects of those that stay.
    kept: BTreeSet<Digest>,
    /// The objects of those that stay for no other reason than that they are young.
    young: BTreeSet<Digest>,
}

impl<'a> Collecting<'a> {
    fn new(store: &'a Store, policy: &'a Policy, census: &'a Census, now: Now) -> Self {
        let (released, linked) = (BTreeSet::new(), BTreeSet::new());
        Self { store, policy, census, now, released, linked, done: Collected::default() }
    }

    fn remove(&mut self, choice: &Choice) -> Result<(), StoreError> {
        self.remove_results(choice)?;
        for position in &choice.partials {
            self.remove_partial(&self.census.partials[*position])?;
        }
        // Who records a result now has stored, or taken into use, all that it names: the times of those files say so.
        let left = self.store.census()?;
        let unnamed = self.unnamed_trees(&left)?;
        let objects = self.unheld_objects(&left, &unnamed);
        self.done.trees = self.remove_files(&unnamed.garbage)?;
        self.done.objects = self.remove_files(&objects)?;
        self.store.forget_unusable()?;
        self.remove_locks();
        Ok(())
    }

    /// What [`Collecting::remove`] would do if nobody else did anything.
    fn pretend(&mut self, choice: &Choice) -> Result<(), StoreError> {
        for (position, because) in &choice.results {
            self.tell_result(&self.census.results[*position], *because)?;
        }
        for position in &choice.partials {
            self.tell_partial(&self.census.partials[*position]);
        }
        let mut left = self.store.census()?;
        let gone: BTreeSet<Digest> = self.done.results.iter().map(|result| result.key).collect();
        left.forget(&gone);
        let unnamed = self.unnamed_trees(&left)?;
        let objects = self.unheld_objects(&left, &unnamed);
        self.done.trees = unnamed.garbage.len();
        self.done.objects = objects.len();
        self.done.freed_bytes += objects.iter().map(|object| object.bytes).sum::<u64>();
        Ok(())
    }

    fn tell_result(&mut self, result: &CountedResult, because: Because) -> Result<(), StoreError> {
        for tree in &result.trees {
            self.released.extend(self.store.named_by(tree)?);
        }
        self.released.extend(&result.trees);
        self.done.results.push(RemovedResult {
            key: result.key,
            kind: result.kind.clone(),
            bytes: result.bytes,
            seconds: result.seconds.or_else(|| self.policy.seconds.get(&result.key).copied()),
            last_use: result.last_use,
            because,
        });
        Ok(())
    }

    fn tell_partial(&mut self, partial: &CountedPartial) {
        let CountedPartial { key, bytes, written } = *partial;
        self.done.partials.push(RemovedPartial { key, bytes, written });
        self.done.freed_bytes += bytes;
    }

    fn remove_results(&mut self, choice: &Choice) -> Result<(), StoreError> {
        let mut waiting = choice.results.iter().peekable();
        let mut gone = Vec::new();
        while waiting.peek().is_some() {
            let batch = self.batch()?;
            while let Some((position, because)) = waiting.next_if(|_| batch.goes_on()) {
                let CountedResult { key, last_use, .. } = &self.census.results[*position];
                // Taken since it was chosen, or removed by somebody else.
                if self.store.last_use(key) != Some(*last_use) || batch.now.protects(*last_use) {
                    self.done.in_use += 1;
                } else if self.store.forget(key)? {
                    gone.push((*position, *because));
                }
            }
            batch.end();
        }
        gone.into_iter()
            .try_for_each(|(position, because)| self.tell_result(&self.census.results[position], because))?;
        // Should the power fail now, no result comes back whose files are gone.
        flush_folder(&self.store.folder("results"))
    }

    /// Removes working state that nobody works with: who does holds its lock.
    fn remove_partial(&mut self, partial: &CountedPartial) -> Result<(), StoreError> {
        let Some(_lock) = self.store.try_lock(&format!("working-{}", partial.key))? else { return Ok(()) };
        let folder = self.store.folder("partial").join(partial.key.to_string());
        // Renamed first, so that a stage finds all of it or nothing; on a disk so full that this fails, in its place.
        let staging = self.store.staging();
        let aside = staging.as_ref().ok().map(|staging| staging.path().join("partial"));
        let gone = aside.filter(|aside| fs::rename(&folder, aside).is_ok()).unwrap_or(folder);
        match fs::remove_dir_all(&gone) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(StoreError::io("remove", &gone, error)),
            _ => {
                self.tell_partial(partial);
                Ok(())
            }
        }
    }

    /// Trees that no result names: those to remove, and the objects of the others.
    fn unnamed_trees(&self, left: &Census) -> Result<Unnamed, StoreError> {
        let mut unnamed = Unnamed::default();
        for tree in left.trees.iter().filter(|tree| tree.names == 0) {
            let is_linked = self.linked.contains(&tree.digest);
            if !is_linked && self.may_go(&tree.digest, tree.changed) {
                let path = self.store.tree_path(&tree.digest);
                // Lists are small, and counted nowhere.
                unnamed.garbage.push(Candidate { path, bytes: 0 });
                continue;
            }
            let objects = self.store.named_by(&tree.digest)?;
            if !is_linked && self.is_young(tree.changed) {
                unnamed.young.extend(&objects);
            }
            unnamed.kept.extend(objects);
        }
        Ok(unnamed)
    }

    /// Objects that no result holds: those to remove. Those that stay since they are young are counted.
    fn unheld_objects(&mut self, left: &Census, unnamed: &Unnamed) -> Vec<Candidate> {
        let mut garbage = Vec::new();
        for object in left.objects.iter().filter(|object| object.holders == 0) {
            let is_kept = unnamed.kept.contains(&object.digest);
            if !is_kept && self.may_go(&object.digest, object.changed) {
                garbage.push(Candidate { path: object.path.clone(), bytes: object.bytes });
            } else if unnamed.young.contains(&object.digest) || (!is_kept && self.is_young(object.changed)) {
                self.done.young_objects += 1;
                self.done.young_bytes += object.bytes;
            }
        }
        garbage
    }

    fn may_go(&self, digest: &Digest, changed: SystemTime) -> bool {
        !self.now.is_new(changed) && (self.released.contains(digest) || !self.is_young(changed))
    }

    fn is_young(&self, changed: SystemTime) -> bool {
        self.now.age(changed) <= self.policy.grace
    }

    /// Removes files, but for those that somebody has taken into use meanwhile; how many.
    fn remove_files(&mut self, candidates: &[Candidate]) -> Result<usize, StoreError> {
        let mut removed = 0;
        let mut waiting = candidates.iter().peekable();
        while waiting.peek().is_some() {
            let batch = self.batch()?;
            while let Some(Candidate { path, bytes }) = waiting.next_if(|_| batch.goes_on()) {
                let Ok(metadata) = fs::symlink_metadata(path) else { continue };
                if !batch.now.is_new(changed(&metadata)) && remove_entry(path)? {
                    self.done.freed_bytes += bytes;
                    removed += 1;
                }
            }
            batch.end();
        }
        Ok(removed)
    }

    fn batch(&self) -> Result<Batch, StoreError> {
        let closed = self.store.close_gate()?;
        // Asked anew behind the closed gate: who comes later passes when this batch is over, and sees what is left.
        let now = Now { now: self.now.now, in_use_since: self.store.in_use_since()? };
        Ok(Batch { now, until: Instant::now() + BATCH, closed })
    }

    /// Removes lock files that nobody holds. Who waits for one finds it gone and makes it anew.
    fn remove_locks(&self) {
        let Ok(entries) = fs::read_dir(self.store.folder("locks")) else { return };
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| belongs_to_a_key(path)) {
            if let Ok(Some(_lock)) = Lock::try_take(&path) {
                let _ = fs::remove_file(&path);
            }
        }
    }
}

/// A stretch of removal behind the closed gate.
struct Batch {
    now: Now,
    until: Instant,
    closed: Closed,
}

impl Batch {
    /// Opens the gate, for long enough that who waits at it passes.
    fn end(self) {
        drop(self.closed);
        thread::sleep(PAUSE);
    }

    fn goes_on(&self) -> bool {
        Instant::now() < self.until
    }
}

/// Whether a lock is one of those that come with each result, and so grow in number.
fn belongs_to_a_key(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    ["result-", "working-", "publish-"].iter().any(|kind| name.starts_with(kind))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;
    use crate::gc::Unpinned;
    use crate::testing::{add, fill, put, read_all, store};
    use crate::{Tree, Verify};

    /// Lets everything go that may.
    fn everything() -> Policy {
        Policy {
            unpinned: Unpinned::Remove,
            grace: Duration::ZERO,
            finished_partials: Duration::ZERO,
            ..Policy::default()
        }
    }

    /// Sets the last use of every result back, as if days had passed.
    fn days_pass(store: &Store) {
        for (path, _) in store.record_files().unwrap() {
            // Another process may be removing it.
            let Ok(file) = fs::File::options().write(true).open(path) else { continue };
            file.set_modified(SystemTime::now() - Duration::from_secs(3 * 24 * 3600)).unwrap();
        }
    }

    fn count(store: &Store) -> (usize, usize, usize) {
        let census = store.census().unwrap();
        (census.results.len(), census.trees.len(), census.objects.len())
    }

    #[test]
    fn what_a_live_folder_of_links_leads_to_is_kept() {
        let (home, store) = store();
        let kept = put(&store, "kept", 1.0, &[("a", "weights")]);
        put(&store, "gone", 1.0, &[("b", "other")]);
        let tree = add(&store, &[("a", "weights")]);
        let target = home.path().join("published");
        store.link_folder(&tree, &target, Verify::Contents).unwrap();
        store.note_linked(&target, &tree).unwrap();
        days_pass(&store);
        let collected = store.collect_garbage(&everything(), Removal::Real).unwrap();
        assert_eq!((collected.results.len(), collected.pinned, count(&store)), (1, 1, (1, 1, 1)), "{collected:?}");
        assert_eq!(collected.young_objects, 0, "{collected:?}");
        // A result that is removed by its key is gone; what the links lead to is not.
        let removed = store.remove_results(&[kept].into(), Removal::Real).unwrap();
        assert_eq!((removed.results.len(), count(&store)), (1, (0, 1, 1)), "{removed:?}");
        // A folder that is gone, one with files of its own in the place of the links, and links that lead elsewhere
        // keep nothing, once nobody is left who may be about to make the links.
        let notes = || fs::read_dir(store.root().join("linked")).unwrap().map(|note| note.unwrap().path());
        let replace = |make: &dyn Fn()| {
            fs::remove_dir_all(&target).unwrap();
            make();
        };
        replace(&|| fill(&target, &[("a", "weights")]));
        let run = Store::open(home.path().join("store")).unwrap();
        run.note_linked(&target, &tree).unwrap();
        store.collect_garbage(&everything(), Removal::Real).unwrap();
        assert_eq!(count(&store), (0, 1, 1), "the run that wrote the note may be about to make the links");
        drop(run);
        let would = store.collect_garbage(&everything(), Removal::DryRun).unwrap();
        assert_eq!((would.objects, notes().count()), (1, 1));
        store.collect_garbage(&everything(), Removal::Real).unwrap();
        assert_eq!((count(&store), notes().count()), ((0, 0, 0), 0));
    }

    #[test]
    fn what_no_result_holds_goes_and_the_rest_stays() {
        let (_home, store) = store();
        put(&store, "kept", 1.0, &[("a", "shared"), ("b", "own")]);
        let gone = put(&store, "gone", 1.0, &[("a", "shared"), ("c", "other")]);
        add(&store, &[("d", "never recorded")]);
        let collected = store.remove_results(&[gone].into(), Removal::DryRun).unwrap();
        assert_eq!((collected.results.len(), collected.trees, collected.objects, collected.freed_bytes), (1, 1, 1, 5));
        assert_eq!((collected.young_objects, collected.young_bytes), (1, 14));
        assert_eq!(count(&store), (2, 3, 4));
        let really = store.remove_results(&[gone].into(), Removal::Real).unwrap();
        assert_eq!(really, collected, "what was never recorded is too young to go");
        assert_eq!(count(&store), (1, 2, 3));
        let collected =
            store.collect_garbage(&Policy { grace: Duration::ZERO, ..Policy::default() }, Removal::Real).unwrap();
        assert_eq!((collected.trees, collected.objects, collected.freed_bytes, collected.left_bytes), (1, 1, 14, 9));
        assert_eq!((collected.young_objects, collected.young_bytes), (0, 0));
        assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
        assert_eq!(count(&store), (1, 1, 2));
    }

    #[test]
    fn what_a_live_process_has_taken_or_stored_stays() {
        let (home, store) = store();
        let taken = put(&store, "taken", 1.0, &[("a", "first")]);
        let other = put(&store, "other", 1.0, &[("b", "second")]);
        days_pass(&store);
        thread::sleep(Duration::from_millis(20));
        let run = Store::open(home.path().join("store")).unwrap();
        assert!(run.take(&taken).unwrap().is_some());
        let tree = add(&run, &[("c", "not recorded yet")]);
        // Content that was garbage already, brought again.
        let collected = store.collect_garbage(&everything(), Removal::Real).unwrap();
        assert_eq!(collected.results.iter().map(|result| result.key).collect::<Vec<_>>(), [other]);
        assert_eq!((collected.in_use, collected.objects), (1, 1));
        assert!(run.complete(&tree) && store.take(&taken).unwrap().is_some());
        drop(run);
        days_pass(&store);
        let collected = store.collect_garbage(&everything(), Removal::Real).unwrap();
        assert_eq!((collected.results.len(), collected.objects, collected.left_bytes), (1, 2, 0));
    }

    /// A run comes when the collector has chosen already, and stands between finding a result and saying that it uses
    /// it.
    #[test]
    fn the_collector_waits_for_who_is_taking_a_result() {
        let (home, store) = store();
        let key = put(&store, "taken", 1.0, &[("a", "first")]);
        days_pass(&store);
        thread::sleep(Duration::from_millis(20));
        thread::scope(|scope| {
            let run = Store::open(home.path().join("store")).unwrap();
            let passage = run.pass().unwrap();
            let collector = scope.spawn(|| store.collect_garbage(&everything(), Removal::Real).unwrap());
            thread::sleep(Duration::from_millis(100));
            assert!(!collector.is_finished());
            assert!(run.result(&key).unwrap().is_some());
            run.mark_used(&key, run.last_use(&key)).unwrap();
            drop(passage);
            let collected = collector.join().unwrap();
            assert_eq!((collected.results.len(), collected.in_use, collected.objects), (0, 1, 0));
            assert!(run.take(&key).unwrap().is_some());
        });
    }

    #[test]
    fn garbage_that_is_brought_again_is_in_use() {
        let (home, store) = store();
        let old = add(&store, &[("a", "first"), ("b", "second")]);
        let held = store.tree(&old).unwrap().files()[1].clone();
        thread::sleep(Duration::from_millis(20));
        let run = Store::open(home.path().join("store")).unwrap();
        let staging = run.staging().unwrap();
        fill(staging.path(), &[("a", "first")]);
        let tree = Tree::of_folder(staging.path()).unwrap();
        run.adopt_object(&staging.path().join("a"), &tree.files()[0]).unwrap();
        assert!(run.hold_object(&held).unwrap());
        assert_eq!(store.collect_garbage(&everything(), Removal::Real).unwrap().objects, 0);
        assert!(run.has(&tree.files()[0]) && run.has(&held));
    }

    #[test]
    fn working_state_of_a_live_stage_stays() {
        let (_home, store) = store();
        put(&store, "done", 1.0, &[("a", "first")]);
        let key = store.census().unwrap().results[0].working_key;
        fs::write(store.partial(&key).unwrap().join("state"), "12345").unwrap();
        thread::sleep(Duration::from_millis(20));
        let policy = Policy { finished_partials: Duration::ZERO, ..Policy::default() };
        let lock = store.lock(&format!("working-{key}")).unwrap();
        assert_eq!(store.collect_garbage(&policy, Removal::Real).unwrap().partials, []);
        drop(lock);
        let collected = store.collect_garbage(&policy, Removal::Real).unwrap();
        assert_eq!((collected.partials.len(), collected.freed_bytes, collected.left_bytes), (1, 5, 5));
        assert_eq!(fs::read_dir(store.folder("partial")).unwrap().count(), 0);
        assert_eq!(fs::read_dir(store.folder("locks")).unwrap().count(), 2, "the gate and the collector's own");
    }

    #[test]
    fn a_record_that_nobody_understands_keeps_what_it_names() {
        let (_home, store) = store();
        let tree = add(&store, &[("a", "first")]);
        let foreign = store.record_path(&Digest::of(b"foreign"));
        fs::write(&foreign, format!(r#"{{"version":9,"tree":"{tree}"}}"#)).unwrap();
        assert_eq!(store.collect_garbage(&everything(), Removal::Real).unwrap().objects, 0);
        assert!(store.complete(&tree) && foreign.exists());
    }

    /// Runs that take or make results, and check every byte of them, while the collector removes all it may, over and
    /// over. Before each round everything is set back by days, so that the collector and the runs race for the same
    /// results.
    #[test]
    fn nothing_in_use_is_lost_to_a_collector_in_a_loop() {
        let (home, store) = store();
        let (made, removed) = (AtomicU32::new(0), AtomicU32::new(0));
        for _round in 0..15 {
            days_pass(&store);
            let over = AtomicBool::new(false);
            thread::scope(|scope| {
                let collector = scope.spawn(|| {
                    // Another process, which only looks.
                    let store = Store::look(home.path().join("store")).unwrap().unwrap();
                    while !over.load(Ordering::SeqCst) {
                        let collected = store.collect_garbage(&everything(), Removal::Real).unwrap();
                        removed.fetch_add(collected.results.len() as u32, Ordering::SeqCst);
                    }
                });
                let runs: Vec<_> = (0..4)
                    .map(|run| {
                        scope.spawn({
                            let (home, made) = (home.path(), &made);
                            move || made.fetch_add(one_run(home, run), Ordering::SeqCst)
                        })
                    })
                    .collect();
                for run in runs {
                    run.join().unwrap();
                }
                over.store(true, Ordering::SeqCst);
                collector.join().unwrap();
            });
            assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
        }
        println!("made {made:?}, removed {removed:?}");
        assert!(made.into_inner() > 12 && removed.into_inner() > 12, "the two did not meet");
    }

    /// Takes, or makes, twelve results that share files, and reads them twice: at once, and when it has all.
    fn one_run(home: &Path, run: usize) -> u32 {
        let store = Store::open(home.join("store")).unwrap();
        let mut made = 0;
        let links = store.staging().unwrap();
        let mut taken = Vec::new();
        for number in 0..12 {
            let number = (number + 3 * run) % 12;
            let name = format!("stage {number}");
            let files = [("own", name.clone()), ("shared", format!("shared {}", number / 3))];
            let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (*path, text.as_str())).collect();
            let mut key = crate::KeyDocument::default();
            key.push("name", name.as_str(), crate::Class::Semantic);
            let key = key.result_key();
            let lock = store.lock(&format!("result-{key}")).unwrap();
            let record = store.take(&key).unwrap().unwrap_or_else(|| {
                made += 1;
                assert_eq!(put(&store, &name, 1.0, &files), key);
                store.take(&key).unwrap().expect("it was recorded a moment ago")
            });
            drop(lock);
            let tree = record.outputs["out"].tree;
            let target = links.path().join(format!("{number}"));
            store.link_folder(&tree, &target, Verify::Contents).unwrap();
            taken.push((
                tree,
                target,
                files.iter().map(|(path, text)| (path.to_string(), text.to_string())).collect::<Vec<_>>(),
            ));
        }
        for (tree, target, files) in taken {
            assert!(store.complete(&tree));
            assert_eq!(read_all(&target), files);
        }
        made
    }
}
