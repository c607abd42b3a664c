//! Lists of CPUs as the kernel and the vendors' tools print them: `0-23,48-71`.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// Logical CPUs, ascending and each once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpuList(Vec<u32>);

/// The largest number of a CPU that is believed: a mistake in a range must not fill the memory.
const LARGEST: u32 = 1 << 20;

/// A text that is no list of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no list of CPUs such as `0-23,48-71`")]
pub struct NoCpuList(String);

impl CpuList {
    /// The list of these.
    pub fn new(cpus: impl IntoIterator<Item = u32>) -> Self {
        let mut cpus: Vec<u32> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }

    /// The CPUs, ascending.
    pub fn cpus(&self) -> &[u32] {
        &self.0
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for CpuList {
    type Err = NoCpuList;

    fn from_str(text: &str) -> Result<Self, NoCpuList> {
        let wrong = || NoCpuList(text.to_owned());
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|cpu| *cpu <= LARGEST).ok_or_else(wrong);
        let mut ranges = Vec::new();
        for part in text.trim().split(',').filter(|part| !part.trim().is_empty()) {
            match part.split_once('-') {
                None => {
                    let cpu = number(part)?;
                    ranges.push(cpu..=cpu);
                }
                Some((first, last)) => {
                    let (first, last) = (number(first)?, number(last)?);
                    if first > last {
                        return Err(wrong());
                    }
                    ranges.push(first..=last);
                }
            }
        }
        // Ranges that overlap are not written out apart: a short text must not fill the memory either.
        ranges.sort_unstable_by_key(|range| *range.start());
        let mut next = 0;
        let mut cpus = Vec::new();
        for range in ranges {
            cpus.extend((*range.start()).max(next)..=*range.end());
            next = next.max(range.end() + 1);
        }
        Ok(Self(cpus))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for range in self.0.chunk_by(|before, after| after - before == 1) {
            match range {
                [] => continue,
                [one] => write!(f, "{separator}{one}")?,
                [first, .., last] => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

impl Serialize for CpuList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_printed_as_the_kernel_does() {
        for text in ["0-23", "0-23,48-71", "3", "0,2,4", ""] {
            assert_eq!(text.parse::<CpuList>().unwrap().to_string(), text);
        }
        assert_eq!(" 144-167\n".parse::<CpuList>().unwrap().len(), 24);
        assert_eq!("1-3,2,0-9,5".parse::<CpuList>().unwrap().to_string(), "0-9");
        assert_eq!("0-1048575,".repeat(1000).parse::<CpuList>().unwrap().len(), 1 << 20);
        assert_eq!("4,0-2,2".parse::<CpuList>().unwrap().to_string(), "0-2,4");
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["NA", "3-1", "0-x", "0-4294967295"] {
            assert!(text.parse::<CpuList>().is_err(), "{text}");
        }
    }
}
