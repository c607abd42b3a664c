//! What one thread recorded: the spans that are open, totals of those that ended, and each of them as an event while
//! there is room.

use crate::work::Work;

/// What a span is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A part of the work, made of other spans.
    Phase,
    /// An operation of known size.
    Kernel,
}

/// The totals of the spans of one name below one other.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) parent: Option<u32>,
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// Shape and rate are those of every call; operations and bytes their sums.
    pub(crate) work: Work,
    pub(crate) calls: u64,
    pub(crate) nanoseconds: u64,
    /// Without that of the spans within.
    pub(crate) own_nanoseconds: u64,
}

/// One span that ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event {
    pub(crate) node: u32,
    /// Since the recorder began.
    pub(crate) began: u64,
    pub(crate) nanoseconds: u64,
    pub(crate) flops: u64,
    pub(crate) bytes: u64,
}

struct Open {
    node: u32,
    began: u64,
    work: Work,
    within: u64,
}

/// A thread's spans.
#[derive(Default)]
pub(crate) struct ThreadLog {
    pub(crate) thread: String,
    pub(crate) nodes: Vec<Node>,
    pub(crate) events: Vec<Event>,
    open: Vec<Open>,
}

impl ThreadLog {
    pub(crate) fn new(thread: String) -> Self {
        Self { thread, ..Self::default() }
    }

    /// Opens a span and gives its depth, by which it is closed.
    pub(crate) fn open(&mut self, kind: Kind, name: &'static str, work: Work, now: u64) -> usize {
        let parent = self.open.last().map(|open| open.node);
        let node = self.node(parent, kind, name, &work);
        self.open.push(Open { node, began: now, work, within: 0 });
        self.open.len() - 1
    }

    /// Closes the span at a depth, and any above it that were forgotten. `keep` says whether there is room for one more
    /// event.
    pub(crate) fn close(&mut self, depth: usize, now: u64, mut keep: impl FnMut(Kind) -> bool) {
        while self.open.len() > depth {
            let Some(Open { node: index, began, work, within }) = self.open.pop() else { return };
            let nanoseconds = now.saturating_sub(began);
            if let Some(outer) = self.open.last_mut() {
                outer.within += nanoseconds;
            }
            let node = &mut self.nodes[index as usize];
            node.calls += 1;
            node.nanoseconds += nanoseconds;
            node.own_nanoseconds += nanoseconds.saturating_sub(within);
            node.work.flops += work.flops;
            node.work.bytes += work.bytes;
            if keep(node.kind) {
                self.events.push(Event { node: index, began, nanoseconds, flops: work.flops, bytes: work.bytes });
            }
        }
    }

    /// The totals that a span belongs to. There are some dozens of them, the last used ones at the end more often than
    /// not.
    fn node(&mut self, parent: Option<u32>, kind: Kind, name: &'static str, work: &Work) -> u32 {
        let is_it = |node: &Node| {
            node.parent == parent && node.work.shape == work.shape && std::ptr::eq(node.name, name) && node.kind == kind
        };
        if let Some(found) = self.nodes.iter().position(is_it) {
            return found as u32;
        }
        let work = Work { flops: 0, bytes: 0, ..*work };
        self.nodes.push(Node { parent, name, kind, work, calls: 0, nanoseconds: 0, own_nanoseconds: 0 });
        (self.nodes.len() - 1) as u32
    }
}
