//! Which results go, and which go first.
//!
//! Never removed: what is pinned, with what links outside the store lead to, and what is in use. Of the rest go, in
//! this order,
//! 1. with [`Unpinned::Remove`], all;
//! 2. those whose last use lies further back than `older_than`;
//! 3. while the store holds more than `max_bytes`: first working state whose stage has a result, the longest unwritten
//!    first; then results by *worth*, the least first. The worth of a result is the seconds that making it took,
//!    divided by the bytes that removing it would free and by the hours since its last use: what is large, quick to
//!    make again and long unused goes before what took a night. A file that several results hold is divided among them,
//!    and counts for nothing where one of them stays in any case.
//!
//! Working state whose stage has a result is old after `finished_partials`. Without a result it is what is left of a
//! run that was cut off, which nothing but time makes worthless: only `older_than` removes it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use crate::Digest;
use crate::census::{Census, CountedResult};
use crate::in_use::FRESH;

/// What garbage collection is asked for.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Results to keep whatever the limits say.
    pub pinned: BTreeSet<Digest>,
    /// What becomes of the others, beside the limits.
    pub unpinned: Unpinned,
    /// Results that nobody has used for so long go.
    pub older_than: Option<Duration>,
    /// Results go until objects and working state take no more than this.
    pub max_bytes: Option<u64>,
    /// How long making a result took, for results whose record does not say so.
    pub seconds: BTreeMap<Digest, f64>,
    /// Working state whose stage has a result goes when it has not been written for so long.
    pub finished_partials: Duration,
    /// What no result holds, and none that is removed held, goes when it is older than this. For machines that share a
    /// store and whose file system does not tell one of the other's locks. `cache gc` and `cache du` call it an hour.
    pub grace: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            pinned: BTreeSet::new(),
            unpinned: Unpinned::Keep,
            older_than: None,
            max_bytes: None,
            seconds: BTreeMap::new(),
            finished_partials: Duration::from_secs(7 * 24 * 3600),
            grace: Duration::from_secs(3600),
        }
    }
}

/// What becomes of results that are not pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unpinned {
    /// They stay, within the limits.
    Keep,
    /// They go.
    Remove,
}

/// Why a result is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Because {
    /// It is not pinned.
    Unpinned,
    /// Nobody has used it for long.
    Old,
    /// The store is to take less room.
    Room,
    /// The user named it.
    Requested,
}

/// What is to be removed.
#[derive(Debug, Default)]
pub(super) struct Choice {
    /// Positions in [`Census::results`], in the order of removal.
    pub results: Vec<(usize, Because)>,
    /// Positions in [`Census::partials`].
    pub partials: Vec<usize>,
    /// Results that would have gone and are pinned.
    pub pinned: usize,
    /// Results that would have gone and are in use.
    pub in_use: usize,
}

/// The moment of the choice, and since when the store is in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    pub now: SystemTime,
    pub in_use_since: Option<SystemTime>,
}

impl Now {
    /// Whether something that was last used at a time is in use.
    pub(super) fn protects(&self, last_use: SystemTime) -> bool {
        self.in_use_since.is_some_and(|since| last_use.checked_add(FRESH).is_none_or(|until| until >= since))
    }

    /// Whether a file that last changed at a time is what a process that lives has stored or held.
    pub(super) fn is_new(&self, changed: SystemTime) -> bool {
        self.in_use_since.is_some_and(|since| changed >= since)
    }

    /// How long ago a time is.
    pub(super) fn age(&self, time: SystemTime) -> Duration {
        self.now.duration_since(time).unwrap_or_default()
    }
}

impl Policy {
    pub(super) fn choose(&self, census: &Census, now: Now) -> Choice {
        let mut choosing = Choosing::new(self, census, now);
        for (position, result) in census.results.iter().enumerate() {
            let old = self.older_than.is_some_and(|limit| now.age(result.last_use) > limit);
            match (self.unpinned, old) {
                (Unpinned::Remove, _) => choosing.remove(position, Because::Unpinned),
                (Unpinned::Keep, true) => choosing.remove(position, Because::Old),
                (Unpinned::Keep, false) => {}
            }
        }
        choosing.old_partials();
        if let Some(most) = self.max_bytes {
            choosing.make_room(most);
        }
        choosing.choice
    }

    /// Chooses these results alone, pinned or not.
    pub(super) fn choose_these(census: &Census, keys: &BTreeSet<Digest>, now: Now) -> Choice {
        let policy = Self::default();
        let mut choosing = Choosing::new(&policy, census, now);
        for (position, result) in census.results.iter().enumerate() {
            if keys.contains(&result.key) {
                choosing.remove(position, Because::Requested);
            }
        }
        choosing.choice
    }

    fn seconds(&self, result: &CountedResult) -> f64 {
        result.seconds.or_else(|| self.seconds.get(&result.key).copied()).unwrap_or(0.0)
    }
}

struct Choosing<'a> {
    policy: &'a Policy,
    census: &'a Census,
    now: Now,
    choice: Choice,
    gone: BTreeSet<usize>,
    /// By object: how many results still hold it.
    holders: Vec<u32>,
    /// What objects and working state take once what is chosen is gone.
    bytes: u64,
}

impl<'a> Choosing<'a> {
    fn new(policy: &'a Policy, census: &'a Census, now: Now) -> Self {
        let holders: Vec<u32> = census.objects.iter().map(|object| object.holders).collect();
        // What nobody holds goes first, except for what a process is about to record.
        let stays = |changed: SystemTime| now.is_new(changed) || now.age(changed) <= policy.grace;
        let kept = census.objects.iter().filter(|object| object.holders > 0 || stays(object.changed));
        let bytes = kept.map(|object| object.bytes).sum::<u64>() + census.partial_bytes();
        Self { policy, census, now, choice: Choice::default(), gone: BTreeSet::new(), holders, bytes }
    }

    /// Chooses a result, unless it must stay.
    fn remove(&mut self, position: usize, because: Because) {
        let result = &self.census.results[position];
        if because != Because::Requested && self.policy.pinned.contains(&result.key) {
            self.choice.pinned += 1;
        } else if self.now.protects(result.last_use) {
            self.choice.in_use += 1;
        } else if self.gone.insert(position) {
            self.choice.results.push((position, because));
            self.bytes -= self.release(position);
        }
    }

    /// Counts a result's files as no longer held by it; the bytes that nobody holds then.
    fn release(&mut self, position: usize) -> u64 {
        let mut freed = 0;
        for object in &self.census.results[position].objects {
            self.holders[*object] -= 1;
            if self.holders[*object] == 0 {
                freed += self.census.objects[*object].bytes;
            }
        }
        freed
    }

    fn old_partials(&mut self) {
        let finished = self.finished();
        for (position, partial) in self.census.partials.iter().enumerate() {
            let age = self.now.age(partial.written);
            let old = self.policy.older_than.is_some_and(|limit| age > limit);
            if old || (finished.contains(&partial.key) && age > self.policy.finished_partials) {
                self.remove_partial(position);
            }
        }
    }

    /// The working keys of stages that have a result.
    fn finished(&self) -> BTreeSet<Digest> {
        self.census.results.iter().map(|result| result.working_key).collect()
    }

    fn remove_partial(&mut self, position: usize) {
        let partial = &self.census.partials[position];
        if !self.now.protects(partial.written) && !self.choice.partials.contains(&position) {
            self.choice.partials.push(position);
            self.bytes -= partial.bytes;
        }
    }

    fn make_room(&mut self, most: u64) {
        let finished = self.finished();
        let mut partials: Vec<usize> = (0..self.census.partials.len()).collect();
        partials.retain(|position| finished.contains(&self.census.partials[*position].key));
        partials.sort_by_key(|position| self.census.partials[*position].written);
        for position in partials {
            if self.bytes > most {
                self.remove_partial(position);
            }
        }
        if self.bytes <= most {
            return;
        }
        let first = self.choice.results.len();
        for position in self.by_worth() {
            if self.bytes <= most {
                break;
            }
            self.remove(position, Because::Room);
        }
        self.take_back_from(first);
    }

    /// The results that may go and would free something, the least worth first.
    fn by_worth(&self) -> Vec<usize> {
        let stays = |position: usize| {
            let result = &self.census.results[position];
            self.policy.pinned.contains(&result.key) || self.now.protects(result.last_use)
        };
        let staying = (0..self.census.results.len()).filter(|position| stays(*position));
        let kept: BTreeSet<usize> =
            staying.flat_map(|position| self.census.results[position].objects.iter().copied()).collect();
        let share = |object: &usize| match kept.contains(object) || self.holders[*object] == 0 {
            true => 0.0,
            false => self.census.objects[*object].bytes as f64 / f64::from(self.holders[*object]),
        };
        let worth = |position: usize| {
            let result = &self.census.results[position];
            let bytes: f64 = result.objects.iter().map(share).sum();
            // A second and an hour are added, so that what took no time, or was used just now, is still compared by the
            // rest.
            let hours = self.now.age(result.last_use).as_secs_f64() / 3600.0 + 1.0;
            (bytes > 0.0).then(|| (self.policy.seconds(result) + 1.0) / bytes / hours)
        };
        let candidates = (0..self.census.results.len()).filter(|position| !self.gone.contains(position));
        let mut worths: Vec<(f64, usize)> =
            candidates.filter_map(|position| Some((worth(position)?, position))).collect();
        worths.sort_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        worths.into_iter().map(|(_, position)| position).collect()
    }

    /// Keeps those results, chosen to make room, that free nothing, since others that stay hold all they have.
    fn take_back_from(&mut self, first: usize) {
        let chosen = self.choice.results.split_off(first);
        for (position, because) in chosen {
            let objects = &self.census.results[position].objects;
            if objects.iter().any(|object| self.holders[*object] == 0) {
                self.choice.results.push((position, because));
                continue;
            }
            objects.iter().for_each(|object| self.holders[*object] += 1);
            self.gone.remove(&position);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::census::{CountedObject, CountedPartial};

    const HOUR: Duration = Duration::from_secs(3600);

    fn now() -> Now {
        Now { now: SystemTime::UNIX_EPOCH + 1_000_000 * HOUR, in_use_since: None }
    }

    fn digest(name: &str) -> Digest {
        Digest::of(name.as_bytes())
    }

    /// Results, each with its name, the seconds it took, the hours since its last use and the objects that it holds.
    fn census(results: &[(&str, f64, u32, &[usize])], objects: &[u64]) -> Census {
        let mut census = Census::default();
        let time = |hours: u32| now().now - hours * HOUR;
        let object = |(at, bytes): (usize, &u64)| {
            let holders = results.iter().filter(|(_, _, _, held)| held.contains(&at)).count() as u32;
            let (digest, path) = (digest(&at.to_string()), PathBuf::new());
            CountedObject { digest, bytes: *bytes, outside_bytes: 0, path, changed: time(9000), holders }
        };
        census.objects = objects.iter().enumerate().map(object).collect();
        census.results = results
            .iter()
            .map(|(name, seconds, idle, held)| CountedResult {
                key: digest(name),
                working_key: digest(&format!("working {name}")),
                kind: (*name).to_owned(),
                seconds: Some(*seconds),
                last_use: time(*idle),
                trees: BTreeSet::new(),
                objects: held.to_vec(),
                bytes: held.iter().map(|object| objects[*object]).sum(),
            })
            .collect();
        census
    }

    fn chosen(policy: &Policy, census: &Census, now: Now) -> Vec<String> {
        policy.choose(census, now).results.iter().map(|(at, _)| census.results[*at].kind.clone()).collect()
    }

    fn most(bytes: u64) -> Policy {
        Policy { max_bytes: Some(bytes), ..Policy::default() }
    }

    #[test]
    fn what_is_cheap_large_and_long_unused_goes_first() {
        let results: [(&str, f64, u32, &[usize]); 4] = [
            ("night", 30_000.0, 500, &[0]),
            ("quick", 10.0, 500, &[1]),
            ("small", 10.0, 1, &[2]),
            ("used", 10.0, 1, &[3]),
        ];
        let census = census(&results, &[1000, 1000, 10, 1000]);
        assert_eq!(chosen(&most(3010), &census, now()), [""; 0]);
        assert_eq!(chosen(&most(3009), &census, now()), ["quick"]);
        assert_eq!(chosen(&most(1500), &census, now()), ["quick", "used"]);
        assert_eq!(chosen(&most(0), &census, now()), ["quick", "used", "night", "small"]);
    }

    #[test]
    fn age_and_pins_decide_before_room_does() {
        let results: [(&str, f64, u32, &[usize]); 3] =
            [("old", 1e6, 800, &[0]), ("pinned", 1.0, 900, &[1]), ("new", 1.0, 1, &[2])];
        let census = census(&results, &[10, 10, 10]);
        let pinned = BTreeSet::from([digest("pinned")]);
        let policy = Policy { older_than: Some(720 * HOUR), pinned, ..Policy::default() };
        let choice = policy.choose(&census, now());
        assert_eq!(choice.results, [(0, Because::Old)]);
        assert_eq!(choice.pinned, 1);
        assert_eq!(chosen(&Policy { unpinned: Unpinned::Remove, ..policy.clone() }, &census, now()), ["old", "new"]);
        assert_eq!(chosen(&Policy { max_bytes: Some(0), ..policy }, &census, now()), ["old", "new"]);
        assert_eq!(chosen(&Policy::default(), &census, now()), [""; 0]);
    }

    #[test]
    fn what_a_live_process_used_stays() {
        let results: [(&str, f64, u32, &[usize]); 2] = [("before", 1.0, 3, &[0]), ("since", 1.0, 1, &[1])];
        let census = census(&results, &[10, 10]);
        let now = Now { in_use_since: Some(now().now - 2 * HOUR), ..now() };
        let policy = Policy { unpinned: Unpinned::Remove, ..Policy::default() };
        let choice = policy.choose(&census, now);
        assert_eq!((choice.results, choice.in_use), (vec![(0, Because::Unpinned)], 1));
        assert_eq!(Policy::choose_these(&census, &[digest("since")].into(), now).in_use, 1);
    }

    #[test]
    fn shared_files_count_by_halves_and_not_at_all_where_one_holder_stays() {
        // `a` and `b` are one folder; alone, each frees nothing.
        let results: [(&str, f64, u32, &[usize]); 3] =
            [("a", 10.0, 9, &[0]), ("b", 10.0, 9, &[0]), ("c", 10.0, 9, &[1])];
        let census = census(&results, &[1500, 1000]);
        assert_eq!(chosen(&most(1500), &census, now()), ["c"], "half of 1500 is less than 1000");
        assert_eq!(chosen(&most(1000), &census, now()), ["c", "a", "b"]);
        let pinned = Policy { pinned: [digest("a")].into(), ..most(0) };
        assert_eq!(chosen(&pinned, &census, now()), ["c"]);
    }

    #[test]
    fn a_result_that_frees_nothing_in_the_end_is_not_removed() {
        // `cheap` is chosen first; then `large` makes all the room, and `twin` still holds what `cheap` had.
        let results: [(&str, f64, u32, &[usize]); 3] =
            [("cheap", 1.0, 9, &[0]), ("twin", 1e6, 9, &[0]), ("large", 10.0, 9, &[1])];
        let census = census(&results, &[1000, 1000]);
        assert_eq!(chosen(&most(1000), &census, now()), ["large"]);
    }

    #[test]
    fn working_state_goes_when_its_stage_has_a_result() {
        let mut census = census(&[("a", 1.0, 9, &[0])], &[1000]);
        let partial =
            |key: &str, hours: u32| CountedPartial { key: digest(key), bytes: 100, written: now().now - hours * HOUR };
        census.partials = vec![partial("working a", 24 * 8), partial("cut off", 24 * 8)];
        let chosen = |policy: &Policy, census: &Census| policy.choose(census, now()).partials;
        assert_eq!(chosen(&Policy::default(), &census), [0]);
        census.partials[0].written = now().now - HOUR;
        assert_eq!(chosen(&Policy::default(), &census), [0; 0]);
        assert_eq!(chosen(&most(1199), &census), [0]);
        // Nothing but time removes what was cut off.
        assert_eq!(chosen(&most(0), &census), [0]);
        assert_eq!(chosen(&Policy { older_than: Some(24 * HOUR), ..Policy::default() }, &census), [1]);
    }

    /// The law of the order: what is left after making room is dearer to make again than what the oldest-first order
    /// leaves.
    #[test]
    fn what_is_left_is_worth_more_than_what_oldest_first_leaves() {
        let mut random = 7_u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let sizes: Vec<u64> = (0..200).map(|_| 1 + draw(1 << 20)).collect();
        let held: Vec<[usize; 1]> = (0..200).map(|at| [at]).collect();
        let results: Vec<(&str, f64, u32, &[usize])> =
            (0..200).map(|at| ("stage", draw(4000) as f64, draw(1000) as u32, &held[at][..])).collect();
        let census = census(&results, &sizes);
        let total: u64 = sizes.iter().sum();
        let most_bytes = total * 3 / 10;
        let gone: BTreeSet<usize> = most(most_bytes).choose(&census, now()).results.iter().map(|(at, _)| *at).collect();
        let seconds_lost: f64 = gone.iter().map(|at| results[*at].1).sum();
        let mut by_age: Vec<usize> = (0..200).collect();
        by_age.sort_by_key(|at| census.results[*at].last_use);
        let (mut left, mut lost_by_age) = (total, 0.0);
        for at in by_age.into_iter().take_while(|at| {
            let over = left > most_bytes;
            left = left.saturating_sub(sizes[*at]);
            over
        }) {
            lost_by_age += results[at].1;
        }
        println!("to make again: {seconds_lost} s, oldest first: {lost_by_age} s");
        assert!(seconds_lost < lost_by_age * 0.8, "{seconds_lost} {lost_by_age}");
    }
}
