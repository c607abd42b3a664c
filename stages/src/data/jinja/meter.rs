//! The account of a rendering: the steps it may still take and the bytes it may still make.
//!
//! A rendering stays on one thread, and filters know no other state that they all could reach, so the account is the
//! thread's.

use std::cell::Cell;

use minijinja::{Error, ErrorKind};

/// Steps that one rendering may take: instructions, and what they look through or copy, counted by [`looked_at`] and
/// [`made`].
pub(crate) const MOST_STEPS: u64 = 10_000_000;

/// Bytes that one rendering may make: its text and all that is made on the way, taken together.
pub(crate) const MOST_BYTES: usize = 256 << 20;

/// Bytes that are looked through in a step: about as fast as an instruction.
const LOOKED_AT_IN_A_STEP: u64 = 32;

/// Bytes that are made in a step.
const MADE_IN_A_STEP: u64 = 64;

/// Which limit was met.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit {
    Steps,
    Bytes,
    Depth,
}

impl Limit {
    pub(super) fn error(self) -> Error {
        match self {
            Self::Steps => Error::new(ErrorKind::OutOfFuel, format!("needs more than {MOST_STEPS} steps")),
            Self::Bytes => {
                Error::new(ErrorKind::WriteFailure, format!("makes a string of more than {} MiB", MOST_BYTES >> 20))
            }
            Self::Depth => {
                let depth = super::measure::DEEPEST;
                Error::new(ErrorKind::InvalidOperation, format!("makes lists or objects nested deeper than {depth}"))
            }
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Account {
    steps: u64,
    bytes: u64,
    /// The limit that was met first: a filter may hide the error that told of it.
    met: Option<Limit>,
    /// Namespaces that were made so far.
    spaces: u64,
    /// Bytes that the next charge is to have, too.
    noted: u64,
}

const CLOSED: Account = Account { steps: 0, bytes: 0, met: None, spaces: 0, noted: 0 };

thread_local! {
    static ACCOUNT: Cell<Account> = const { Cell::new(CLOSED) };
}

/// Does some work on a new account, and tells which limit it met.
pub(super) fn on_account<T>(work: impl FnOnce() -> T) -> (T, Option<Limit>) {
    let open = Account { steps: MOST_STEPS, bytes: MOST_BYTES as u64, ..CLOSED };
    let before = ACCOUNT.replace(open);
    let result = work();
    (result, ACCOUNT.replace(before).met)
}

/// Charges steps.
pub(super) fn steps(count: u64) -> Result<(), Error> {
    charge(count, 0)
}

/// Charges looking through so many bytes.
pub(super) fn looked_at(bytes: u64) -> Result<(), Error> {
    charge(bytes / LOOKED_AT_IN_A_STEP, 0)
}

/// Charges so many bytes that are about to be made.
pub(crate) fn made(bytes: u64) -> Result<(), Error> {
    charge(bytes / MADE_IN_A_STEP, bytes)
}

/// Ends the rendering at a limit.
pub(super) fn meet(limit: Limit) -> Error {
    let mut account = ACCOUNT.get();
    account.met.get_or_insert(limit);
    ACCOUNT.set(account);
    limit.error()
}

/// The number of a namespace that is made now, from 1.
pub(super) fn next_space() -> u64 {
    let mut account = ACCOUNT.get();
    account.spaces += 1;
    ACCOUNT.set(account);
    account.spaces
}

/// Remembers bytes for the next charge.
pub(super) fn note(bytes: u64) {
    ACCOUNT.set(Account { noted: bytes, ..ACCOUNT.get() });
}

/// The bytes that were noted, once.
pub(super) fn noted() -> u64 {
    let account = ACCOUNT.get();
    if account.noted > 0 {
        ACCOUNT.set(Account { noted: 0, ..account });
    }
    account.noted
}

fn charge(steps: u64, bytes: u64) -> Result<(), Error> {
    let mut account = ACCOUNT.get();
    // Bytes first: who makes too many of them takes too many steps as well.
    let Some(bytes) = account.bytes.checked_sub(bytes) else { return Err(meet(Limit::Bytes)) };
    let Some(steps) = account.steps.checked_sub(steps) else { return Err(meet(Limit::Steps)) };
    (account.steps, account.bytes) = (steps, bytes);
    ACCOUNT.set(account);
    Ok(())
}
