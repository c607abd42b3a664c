//! `npu-smi info`: which NPUs there are, and how they are.
//!
//! The tool prints a table for people and no other form. A chip takes two lines, under a header of two lines. The
//! header says what there is: cards of several chips have a column for the chip's number in the machine (`Device`,
//! later `Phy-ID`), old versions have none for huge pages, and chips without HBM show `Memory-Usage` alone. The newest
//! chips (950) have the number and the name in columns apart.

/// What the table says of a chip.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Chip {
    pub card: u32,
    /// Its number on the card.
    pub chip: u32,
    /// Its number in the machine, where the table has it.
    pub physical: Option<u32>,
    pub name: String,
    /// Its health, as printed.
    pub health: String,
    /// What it draws.
    pub power_watts: Option<f64>,
    /// How warm it is.
    pub temperature_celsius: Option<f64>,
    /// Its place on the bus, in lower case.
    pub bus_id: Option<String>,
    /// Its memory in use and in all, in bytes: HBM, else the other.
    pub memory: Option<(u64, u64)>,
}

/// A line of the table of processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessLine {
    pub card: u32,
    /// The chip's number on it.
    pub chip: u32,
    /// The process.
    pub pid: u32,
    /// Its name, often left out.
    pub name: Option<String>,
    /// What it holds, in bytes.
    pub memory: Option<u64>,
}

/// What `npu-smi info` says.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Info {
    /// The version of the tool, which is the driver's.
    pub version: Option<String>,
    /// The chips, in the order of the table.
    pub chips: Vec<Chip>,
    /// What runs on them.
    pub processes: Vec<ProcessLine>,
    /// Lines outside the table that warn.
    pub warnings: Vec<String>,
}

/// Which table a line belongs to.
enum Section {
    Head,
    Chips,
    Processes,
}

/// Reads what `npu-smi info` prints; None where it holds no such table.
pub(crate) fn read(text: &str) -> Option<Info> {
    let mut info = Info::default();
    let mut section = Section::Head;
    let mut first: Option<Chip> = None;
    for line in text.lines().map(str::trim) {
        let Some(cells) = cells(line) else {
            if line.to_ascii_uppercase().contains("WARNING") {
                info.warnings.push(line.to_owned());
            }
            continue;
        };
        if let Some(version) = cells[0].strip_prefix("npu-smi ") {
            info.version = version.split_whitespace().next().map(str::to_owned);
        } else if cells.iter().any(|cell| cell.starts_with("Process id")) {
            section = Section::Processes;
        } else if cells.contains(&"Health") || cells.contains(&"Bus-Id") {
            section = Section::Chips;
        } else {
            match section {
                Section::Head => {}
                Section::Chips => info.chip_line(&cells, &mut first),
                Section::Processes => info.processes.extend(process_line(&cells)),
            }
        }
    }
    info.chips.extend(first);
    info.forget_repeats();
    (!info.chips.is_empty() || !matches!(section, Section::Head)).then_some(info)
}

impl Info {
    /// A chip's first line begins it and its second completes it. One that the tool could not ask has no second.
    fn chip_line(&mut self, cells: &[&str], first: &mut Option<Chip>) {
        // The columns of the number and the name may be one or two.
        let (labels, [state, figures]) = match cells {
            [label, state, figures] => (vec![*label], [*state, *figures]),
            [number, name, state, figures] => (vec![*number, *name], [*state, *figures]),
            _ => return,
        };
        let mut labels = labels.into_iter().flat_map(str::split_whitespace);
        match first.take() {
            Some(chip) if !is_health(state) => {
                let physical = labels.next().map(|number| (number.parse().unwrap_or(0), labels.next()));
                self.chips.push(second_line(chip, physical, state, figures));
            }
            before => {
                self.chips.extend(before);
                let card = labels.next().and_then(|number| number.parse().ok());
                let name = labels.collect::<Vec<_>>().join(" ");
                *first = card.map(|card| first_line(card, name, state, figures));
            }
        }
    }

    /// Under soft partitioning a container that was given one chip of a card sees it twice.
    fn forget_repeats(&mut self) {
        let mut seen = std::collections::BTreeSet::new();
        self.chips.retain(|chip| chip.physical.is_none_or(|physical| seen.insert(physical)));
    }
}

fn first_line(card: u32, name: String, health: &str, figures: &str) -> Chip {
    let mut figures = figures.split_whitespace();
    let mut number = || figures.next()?.parse().ok().filter(|figure: &f64| figure.is_finite());
    Chip {
        card,
        name,
        health: health.to_owned(),
        power_watts: number(),
        temperature_celsius: number(),
        ..Chip::default()
    }
}

fn second_line(chip: Chip, numbers: Option<(u32, Option<&str>)>, bus_id: &str, figures: &str) -> Chip {
    let (number, physical) = numbers.unwrap_or((0, None));
    Chip {
        chip: number,
        physical: physical.and_then(|physical| physical.parse().ok()),
        bus_id: bus_id.contains(':').then(|| bus_id.to_ascii_lowercase()),
        memory: usages(figures).into_iter().rev().find(|(_, total)| *total > 0),
        ..chip
    }
}

/// `0  0 / 0  3318 / 65536`: pairs in use and in all, in MB that are MiB; the first figure is a load.
fn usages(figures: &str) -> Vec<(u64, u64)> {
    let spaced = figures.replace('/', " / ");
    let tokens: Vec<&str> = spaced.split_whitespace().collect();
    let pairs = tokens.windows(3).filter_map(|window| match window {
        [used, "/", total] => Some((mebibytes(used)?, mebibytes(total)?)),
        _ => None,
    });
    pairs.collect()
}

/// A count of MiB, in bytes.
fn mebibytes(cell: &str) -> Option<u64> {
    cell.parse::<u64>().ok()?.checked_mul(1 << 20)
}

fn process_line(cells: &[&str]) -> Option<ProcessLine> {
    let [numbers, pid, name, memory] = cells else { return None };
    let mut numbers = numbers.split_whitespace();
    Some(ProcessLine {
        card: numbers.next()?.parse().ok()?,
        chip: numbers.next().and_then(|chip| chip.parse().ok()).unwrap_or(0),
        pid: pid.parse().ok()?,
        name: Some(*name).filter(|name| !name.is_empty() && *name != "NA").map(str::to_owned),
        memory: mebibytes(memory),
    })
}

/// The words that stand for health in the driver's own tool, and the two of its documents.
fn is_health(state: &str) -> bool {
    ["OK", "WARNING", "ALARM", "CRITICAL", "UNKNOWN", "OFFLINE"].contains(&state.to_ascii_uppercase().as_str())
}

fn cells(line: &str) -> Option<Vec<&str>> {
    let inner = line.strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn eight_910b3_as_their_owner_printed_them() {
        let info = read(include_str!("../../tests/npu-smi/910b3x8.info.txt")).unwrap();
        assert_eq!(info.version.as_deref(), Some("24.1.rc1.b030"));
        assert_eq!(info.chips.len(), 8);
        assert_eq!(
            info.chips[0],
            Chip {
                card: 0,
                chip: 0,
                physical: None,
                name: "910B3".to_owned(),
                health: "OK".to_owned(),
                power_watts: Some(101.8),
                temperature_celsius: Some(43.0),
                bus_id: Some("0000:c1:00.0".to_owned()),
                memory: Some((3318 << 20, 64 * GIB)),
            }
        );
        assert_eq!(info.chips[7].bus_id.as_deref(), Some("0000:42:00.0"));
        assert!(info.processes.is_empty() && info.warnings.is_empty());
    }

    #[test]
    fn any_number_of_cards() {
        let block = include_str!("../../tests/npu-smi/910b3x8.info.txt");
        let lines: Vec<&str> = block.lines().collect();
        let (head, card) = (lines[..6].join("\n"), lines[6..9].join("\n"));
        for count in [1, 2, 4, 16] {
            let table = head.clone() + "\n" + &vec![card.clone(); count].join("\n");
            assert_eq!(read(&table).unwrap().chips.len(), count);
        }
    }

    #[test]
    fn sick_cards_and_one_that_could_not_be_asked() {
        let info = read(include_str!("../../tests/npu-smi/910b-sick.info.txt")).unwrap();
        let seen: Vec<_> =
            info.chips.iter().map(|chip| (chip.card, chip.health.as_str(), chip.memory.is_some())).collect();
        assert_eq!(seen, [(0, "OK", true), (1, "Alarm", true), (2, "UNKNOWN", false), (4, "Warning", true)]);
        assert_eq!(info.chips[3].memory, Some((62011 << 20, 64 * GIB)));
        assert_eq!(info.processes.len(), 2);
        assert_eq!(info.processes[0].name.as_deref(), Some("python"));
        assert_eq!((info.processes[1].pid, info.processes[1].memory), (20999, Some(132 << 20)));
        assert_eq!(info.processes[1].name, None);
        assert_eq!(info.warnings.len(), 1);
    }

    #[test]
    fn an_old_tool_without_huge_pages() {
        let info = read(include_str!("../../tests/npu-smi/910a-old.info.txt")).unwrap();
        assert_eq!(info.chips.len(), 2);
        assert_eq!(info.chips[1].health, "Warning");
        assert_eq!(info.chips[1].temperature_celsius, Some(35.0));
        // Both kinds of memory are shown; models are in the second.
        assert_eq!(info.chips[1].memory, Some((1024 << 20, 32 * GIB)));
    }

    #[test]
    fn cards_of_four_chips_without_hbm() {
        let info = read(include_str!("../../tests/npu-smi/310-four-chips.info.txt")).unwrap();
        let seen: Vec<_> = info.chips.iter().map(|chip| (chip.card, chip.chip, chip.physical)).collect();
        assert_eq!(seen, [(2, 0, Some(0)), (2, 1, Some(1)), (2, 2, Some(2)), (2, 3, Some(3))]);
        assert_eq!(info.chips[2].health, "Critical");
        assert_eq!(info.chips[0].memory, Some((2703 << 20, 8 * GIB)));
    }

    #[test]
    fn cards_of_two_chips_whose_numbers_are_slots() {
        let info = read(include_str!("../../tests/npu-smi/310p-duo.info.txt")).unwrap();
        let seen: Vec<_> = info.chips.iter().map(|chip| (chip.card, chip.chip, chip.physical)).collect();
        assert_eq!(seen, [(8, 0, Some(0)), (8, 1, Some(1)), (40, 0, Some(2)), (40, 1, Some(3))]);
        assert_eq!((info.chips[2].health.as_str(), info.chips[2].bus_id.as_deref()), ("Alarm", None));
        assert_eq!(info.chips[2].power_watts, None);
        assert_eq!(info.processes.len(), 1);
        assert_eq!((info.processes[0].card, info.processes[0].chip), (40, 1));
    }

    #[test]
    fn two_dies_of_a_910_93_draw_their_power_together() {
        let info = read(include_str!("../../tests/npu-smi/a3-container.info.txt")).unwrap();
        let seen: Vec<_> = info.chips.iter().map(|chip| (chip.physical, chip.power_watts.is_some())).collect();
        assert_eq!(seen, [(Some(12), true), (Some(13), false), (Some(14), true), (Some(15), false)]);
        assert_eq!(info.chips[1].temperature_celsius, Some(37.0));
        assert_eq!(info.processes.len(), 2);
    }

    #[test]
    fn a_die_that_is_listed_twice_is_one() {
        assert_eq!(read(include_str!("../../tests/npu-smi/a3-one-die-twice.info.txt")).unwrap().chips.len(), 1);
    }

    #[test]
    fn the_newest_form_with_columns_apart() {
        let info = read(include_str!("../../tests/npu-smi/950.info.txt")).unwrap();
        assert_eq!(info.chips.len(), 2);
        assert_eq!((info.chips[1].card, info.chips[1].name.as_str()), (1, "Ascend950PR"));
        assert_eq!(info.chips[1].memory, Some((4 * GIB, 128 * GIB)));
        assert_eq!(info.processes[0].card, 1);
    }

    #[test]
    fn what_is_no_table_is_none() {
        assert_eq!(read("dcmi model initialized failed, because the device is used. ret is -8020\n"), None);
        assert_eq!(read(""), None);
    }
}
