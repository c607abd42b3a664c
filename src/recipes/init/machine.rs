//! What this machine has, and which models and recipes it has the memory for.

use std::thread;
use std::time::Duration;

use devices::{Device, DeviceKind, Inventory};
use engine::memory::Memory;

use crate::recipes::models::{self, Model};
use crate::words;

/// How long a vendor's tool may take.
const TOOL_LIMIT: Duration = Duration::from_secs(5);

/// The largest model that is offered for a CPU, in millions of parameters: more of them take days.
const MOST_ON_A_CPU: u64 = 600;

/// What is computed on.
#[derive(Debug)]
pub(super) struct Machine {
    cores: usize,
    /// Bytes of main memory.
    memory: u64,
    /// The devices of the kind that has most; without any, the CPU computes.
    pub(super) accelerators: Vec<Device>,
}

impl Machine {
    pub(super) fn here() -> Self {
        let kinds: Vec<DeviceKind> = DeviceKind::accelerators().collect();
        let inventory = Inventory::of(&devices::Machine::here().with_limit(TOOL_LIMIT), &kinds);
        let of_kind = |kind| -> Vec<Device> {
            inventory.of_kind(kind).filter(|device| device.health.is_usable()).cloned().collect()
        };
        Self {
            cores: thread::available_parallelism().map_or(1, usize::from),
            memory: Memory::default().total().unwrap_or(0),
            accelerators: kinds.into_iter().map(of_kind).max_by_key(Vec::len).unwrap_or_default(),
        }
    }

    /// In words, for the head of the file.
    pub(super) fn describe(&self) -> String {
        let devices = match self.accelerators.as_slice() {
            [] => "no GPU or NPU".to_owned(),
            [first, ..] => {
                let memory = first.memory_total.map_or(String::new(), |memory| format!(" of {}", words::bytes(memory)));
                format!("{} × {}{memory}", self.accelerators.len(), words::visible(&first.name))
            }
        };
        format!("{}, {} of memory, {devices}", words::plural(self.cores, "core"), words::bytes(self.memory))
    }

    /// Bytes that a model can have: on one device, or in main memory.
    pub(super) fn room(&self) -> u64 {
        self.accelerators.iter().map(|device| device.memory_total.unwrap_or(u64::MAX)).min().unwrap_or(self.memory)
    }

    /// The largest model without a licence to accept that a recipe has room for here.
    pub(super) fn suggested(&self, recipe: &str) -> &'static Model {
        let open = || models::ALL.iter().filter(|model| model.repo.starts_with("Qwen/Qwen2.5-"));
        let most = if self.accelerators.is_empty() { MOST_ON_A_CPU } else { u64::MAX };
        let fits = |model: &&Model| model.parameters <= most && needed(recipe, model) <= self.room();
        let smallest = || open().min_by_key(|model| model.parameters);
        open().filter(fits).max_by_key(|model| model.parameters).or_else(smallest).expect("the list has some")
    }
}

/// About how many bytes a recipe needs: weights in bf16 where they are frozen, else weights, gradients and moments in
/// f32; a quarter more for activations, and what the program itself takes. `pipeline plan` estimates from the file.
pub(super) fn needed(recipe: &str, model: &Model) -> u64 {
    let per_parameter = if ["full", "pretrain"].contains(&recipe) { 16 } else { 2 };
    model.parameters * 1_000_000 * per_parameter * 5 / 4 + (1 << 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_model_with_room_is_suggested() {
        let gpu = |memory| {
            let device = Device { memory_total: Some(memory), ..Device::new(DeviceKind::Cuda, 0, "GPU") };
            Machine { cores: 8, memory: 1 << 40, accelerators: vec![device] }
        };
        assert_eq!(gpu(24 << 30).suggested("lora").repo, "Qwen/Qwen2.5-7B-Instruct");
        assert_eq!(gpu(24 << 30).suggested("full").repo, "Qwen/Qwen2.5-0.5B-Instruct");
        assert_eq!(gpu(1 << 20).suggested("lora").repo, "Qwen/Qwen2.5-0.5B-Instruct");
        let cpu = Machine { cores: 8, memory: 1 << 40, accelerators: Vec::new() };
        assert_eq!(cpu.suggested("lora").repo, "Qwen/Qwen2.5-0.5B-Instruct");
    }
}
