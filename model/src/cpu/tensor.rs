//! Tensors in main memory, their buffers taken from and given back to a pool.
//!
//! A decoder's activations come and go at the same sizes in every step. Fresh memory for each would cost a page fault
//! per 4 KiB, which can be half of a step; a pool costs a lock per tensor.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use super::memory::{Arena, Memory};

/// A row-major matrix of f32. The default is empty and belongs to no pool yet.
#[derive(Default)]
pub struct Tensor {
    rows: usize,
    columns: usize,
    /// As long as its size class, or up to half as long again; the values are its first `rows · columns`.
    buffer: Memory<f32>,
    /// Of so many values.
    class: usize,
    pool: Option<Arc<BufferPool>>,
}

impl Tensor {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The values, row by row.
    pub fn values(&self) -> &[f32] {
        &self.buffer[..self.rows * self.columns]
    }

    /// The values, row by row.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.buffer[..self.rows * self.columns]
    }

    /// The values for others to read, until the tensor is written to.
    pub(super) fn lend(&mut self) -> Memory<f32> {
        self.buffer.lend(self.rows * self.columns)
    }

    /// Gives the tensor a shape. The values are whatever they are: the caller overwrites all of them.
    pub(super) fn reshape(&mut self, pool: &Arc<BufferPool>, rows: usize, columns: usize) {
        let class = size_class(rows * columns);
        if class != self.class {
            self.release();
            self.buffer = pool.take(class);
            self.class = class;
            self.pool = Some(Arc::clone(pool));
        }
        (self.rows, self.columns) = (rows, columns);
    }

    fn release(&mut self) {
        if let Some(pool) = self.pool.take() {
            pool.give(std::mem::take(&mut self.buffer), std::mem::take(&mut self.class));
        }
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        self.release();
    }
}

/// Buffers that no tensor uses.
#[derive(Default)]
pub(super) struct BufferPool {
    shelves: Mutex<Shelves>,
    memory: Arena,
}

/// Free buffers by their length, and how many values all have and how many are needed.
///
/// Rows of changing length need buffers of other classes in each step: a free one that is at most half as long again
/// serves. The rest would pile up. Together with those in use they hold at most a quarter more than was once needed at
/// a time: before a new one goes beyond that, those go that were free for longest. (None more would not do: temporary
/// buffers of one step are not all in use together, and would be made anew in each.)
#[derive(Default)]
struct Shelves {
    free: BTreeMap<usize, VecDeque<FreeBuffer>>,
    /// Of all buffers, free or in use.
    held_values: usize,
    /// By the classes of what is in use.
    needed_values: usize,
    most_needed_values: usize,
    /// Buffers given back so far: tells which has been free for longest.
    given: u64,
}

struct FreeBuffer {
    values: Memory<f32>,
    /// Number of its return.
    since: u64,
}

impl Shelves {
    /// The shortest free buffer for a class; of several the one that was in use last.
    fn take(&mut self, class: usize) -> Option<Memory<f32>> {
        let (_, shelf) = self.free.range_mut(class..=class + class / 2).find(|(_, shelf)| !shelf.is_empty())?;
        shelf.pop_back().map(|buffer| buffer.values)
    }

    /// Takes out the free buffers that keep what is held above its bound.
    fn surplus(&mut self) -> Vec<Memory<f32>> {
        let most = self.most_needed_values + self.most_needed_values / 4;
        let mut surplus = Vec::new();
        while self.held_values > most {
            let oldest = self.free.values_mut().filter(|shelf| !shelf.is_empty()).min_by_key(|shelf| shelf[0].since);
            let Some(buffer) = oldest.and_then(VecDeque::pop_front) else { break };
            self.held_values -= buffer.values.len();
            surplus.push(buffer.values);
        }
        surplus
    }
}

impl BufferPool {
    fn take(&self, class: usize) -> Memory<f32> {
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        shelves.needed_values += class;
        shelves.most_needed_values = shelves.most_needed_values.max(shelves.needed_values);
        if let Some(found) = shelves.take(class) {
            return found;
        }
        shelves.held_values += class;
        let surplus = shelves.surplus();
        drop(shelves);
        // Before the new one is made, which may then lie in their place.
        drop(surplus);
        self.memory.room(class)
    }

    fn give(&self, buffer: Memory<f32>, class: usize) {
        let length = buffer.len();
        if length == 0 {
            return;
        }
        let mut shelves = self.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        shelves.needed_values -= class;
        let Some(values) = buffer.alone() else {
            shelves.held_values -= length;
            return;
        };
        shelves.given += 1;
        let since = shelves.given;
        shelves.free.entry(length).or_default().push_back(FreeBuffer { values, since });
    }
}

/// The length of the buffer for so many values: at most a quarter more, so that nearly equal sizes share buffers.
fn size_class(values: usize) -> usize {
    if values == 0 {
        return 0;
    }
    let step = (values.next_power_of_two() / 8).max(16);
    values.div_ceil(step) * step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again() {
        let pool = Arc::new(BufferPool::default());
        let mut first = Tensor::default();
        first.reshape(&pool, 100, 10);
        let address = first.values().as_ptr();
        drop(first);
        let mut second = Tensor::default();
        second.reshape(&pool, 10, 99);
        assert_eq!(second.values().as_ptr(), address);
        assert_eq!((second.rows(), second.columns(), second.values().len()), (10, 99, 990));
    }

    #[test]
    fn what_was_lent_is_copied_before_it_is_written_to() {
        let pool = Arc::new(BufferPool::default());
        let mut tensor = Tensor::default();
        tensor.reshape(&pool, 7, 9);
        tensor.values_mut().fill(1.0);
        let address = tensor.values().as_ptr();
        let read = tensor.lend();
        assert_eq!((read.as_ptr(), read.len()), (address, 63));
        tensor.values_mut()[3] = 2.0;
        assert!(read.iter().all(|value| *value == 1.0));
        assert_eq!(tensor.values()[..5], [1.0, 1.0, 1.0, 2.0, 1.0]);
        // Nobody reads it any more: it is written to where it is.
        drop(tensor.lend());
        let address = tensor.values().as_ptr();
        tensor.values_mut()[3] = 3.0;
        assert_eq!(tensor.values().as_ptr(), address);
    }

    #[test]
    fn a_buffer_that_is_read_is_not_given_away() {
        let pool = Arc::new(BufferPool::default());
        let mut first = Tensor::default();
        first.reshape(&pool, 64, 64);
        first.values_mut().fill(1.0);
        let read = first.lend();
        drop(first);
        let mut second = Tensor::default();
        second.reshape(&pool, 64, 64);
        second.values_mut().fill(2.0);
        assert!(read.iter().all(|value| *value == 1.0));
    }

    #[test]
    fn free_buffers_of_changing_sizes_do_not_pile_up() {
        let pool = Arc::new(BufferPool::default());
        for rows in 1..200 {
            let mut tensors: [Tensor; 4] = Default::default();
            tensors.iter_mut().for_each(|tensor| tensor.reshape(&pool, rows, 64));
        }
        let shelves = pool.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        let held: usize = shelves.free.values().flatten().map(|buffer| buffer.values.len()).sum();
        assert_eq!((held, shelves.needed_values), (shelves.held_values, 0));
        assert!(held <= 4 * size_class(199 * 64) * 5 / 4, "{held}");
    }

    #[test]
    fn a_buffer_that_is_somewhat_longer_serves() {
        let pool = Arc::new(BufferPool::default());
        let address = |rows| {
            let mut tensor = Tensor::default();
            tensor.reshape(&pool, rows, 64);
            assert_eq!(tensor.values().len(), rows * 64);
            tensor.values().as_ptr()
        };
        let first = address(96);
        assert_eq!(address(64), first);
        assert_ne!(address(48), first);
        let shelves = pool.shelves.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!((shelves.needed_values, shelves.most_needed_values), (0, 96 * 64));
    }

    #[test]
    fn the_buffer_that_was_free_for_longest_goes_first() {
        let pool = Arc::new(BufferPool::default());
        let tensor = |columns| {
            let mut tensor = Tensor::default();
            tensor.reshape(&pool, 64, columns);
            tensor
        };
        // 512 values of 64 rows are the most in use at a time; a quarter more may be held.
        let (first, second) = (tensor(256), tensor(256));
        drop(first);
        drop(second);
        drop(tensor(128));
        let classes = |pool: &BufferPool| {
            let shelves = pool.shelves.lock().unwrap_or_else(PoisonError::into_inner);
            [256, 128, 64].map(|columns| shelves.free.get(&(64 * columns)).map_or(0, VecDeque::len))
        };
        assert_eq!(classes(&pool), [2, 1, 0]);
        drop(tensor(64));
        assert_eq!(classes(&pool), [1, 1, 1]);
    }

    #[test]
    fn a_size_class_holds_its_values_and_little_more() {
        for values in 1..5000 {
            let class = size_class(values);
            assert!(class >= values && class <= (values + 16).max(values * 5 / 4), "{values} in {class}");
        }
    }
}
