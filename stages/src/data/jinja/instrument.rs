//! Which instruction is preceded by which check.
//!
//! minijinja's machinery is not stable, so every instruction is named here: a version with another one does not
//! compile.

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::checks;
use super::space;

/// A text up to this long costs no more to compare or look up than an instruction.
const SHORT: usize = 64;

/// The filters of a template whose place is remembered by minijinja. The checks get what the template leaves free.
const PLACES: u8 = 50;

/// The place of a filter that is looked up by its name each time.
const NO_PLACE: u8 = u8::MAX;

/// The same program with checks in it.
pub(super) fn with_checks<'s>(program: &Instructions<'s>) -> Result<Instructions<'s>, Error> {
    let mut writer = Writer::new(program);
    let mut in_target = false;
    let mut before: Option<&Instruction<'s>> = None;
    let mut at = 0;
    while let Some(instruction) = program.get(at) {
        writer.starts.push(writer.next);
        let before_this = before.filter(|_| !writer.is_target(at));
        in_target = match instruction {
            Instruction::Iterate(_) => true,
            Instruction::DupTop | Instruction::UnpackList(_) | Instruction::StoreLocal(_) => in_target,
            _ => false,
        };
        writer.write(at, instruction, before_this, in_target)?;
        before = Some(instruction);
        at += 1;
    }
    writer.starts.push(writer.next);
    Ok(writer.finish())
}

/// Writes instructions behind one another, and remembers where each began.
struct Writer<'p, 's> {
    program: &'p Instructions<'s>,
    written: Instructions<'s>,
    next: u32,
    /// Where each instruction of the program begins now, with its check.
    starts: Vec<u32>,
    /// Where something jumps to, in the program.
    targets: Vec<bool>,
    /// The checks that are used so far, in the order of their places.
    placed: Vec<&'static str>,
    first_place: u8,
}

impl<'p, 's> Writer<'p, 's> {
    fn new(program: &'p Instructions<'s>) -> Self {
        let mut targets = Vec::new();
        let mut first_place = 0;
        let mut at = 0;
        while let Some(instruction) = program.get(at) {
            if let Some(target) = target(instruction) {
                let target = target as usize;
                targets.resize(targets.len().max(target + 1), false);
                targets[target] = true;
            }
            if let Instruction::ApplyFilter(_, _, place) = instruction
                && *place != NO_PLACE
            {
                first_place = first_place.max(place + 1);
            }
            at += 1;
        }
        let written = Instructions::new(program.name(), program.source());
        Self { program, written, next: 0, starts: Vec::new(), targets, placed: Vec::new(), first_place }
    }

    fn is_target(&self, at: u32) -> bool {
        self.targets.get(at as usize).copied().unwrap_or(false)
    }

    fn add(&mut self, at: u32, instruction: Instruction<'s>) {
        match (self.program.get_span(at), self.program.get_line(at)) {
            (Some(span), _) => self.written.add_with_span(instruction, span),
            (None, Some(line)) => self.written.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX)),
            (None, None) => self.written.add(instruction),
        };
        self.next += 1;
    }

    fn place(&mut self, check: &'static str) -> u8 {
        let known = self.placed.iter().position(|placed| *placed == check);
        let index = known.unwrap_or_else(|| {
            self.placed.push(check);
            self.placed.len() - 1
        });
        u8::try_from(index)
            .ok()
            .and_then(|index| self.first_place.checked_add(index))
            .filter(|place| *place < PLACES)
            .unwrap_or(NO_PLACE)
    }

    /// A check of the value on top.
    fn check(&mut self, at: u32, check: &'static str) {
        self.apply(at, check, 1);
    }

    /// A check of the topmost values, which stay as they are.
    fn check_several(&mut self, at: u32, check: &'static str, count: usize) -> Result<(), Error> {
        self.apply(at, check, u16::try_from(count).map_err(|_| refused("more values at once than can be counted"))?);
        self.add(at, Instruction::UnpackList(count));
        Ok(())
    }

    /// A check of both sides of an operator, or of the left alone.
    fn check_sides(&mut self, at: u32, [right, left]: [&'static str; 2], right_is_short: bool) {
        if !right_is_short {
            self.check(at, right);
        }
        self.add(at, Instruction::Swap);
        self.check(at, left);
        self.add(at, Instruction::Swap);
    }

    fn apply(&mut self, at: u32, check: &'static str, count: u16) {
        let place = self.place(check);
        self.add(at, Instruction::ApplyFilter(check, Some(count), place));
    }

    /// Writes an instruction with what precedes it. `before` is the instruction before it, where nothing else leads to
    /// it.
    fn write(
        &mut self,
        at: u32,
        instruction: &Instruction<'s>,
        before: Option<&Instruction<'s>>,
        in_target: bool,
    ) -> Result<(), Error> {
        let constant = match before {
            Some(Instruction::LoadConst(value)) => Some(value),
            _ => None,
        };
        let beside_short = constant.is_some_and(is_short);
        let beside_number = constant.is_some_and(|value| value.is_number());
        match instruction {
            // Written by the formatter, which charges it.
            Instruction::EmitRaw(text) => {
                self.add(at, Instruction::LoadConst(Value::from_safe_string((*text).to_owned())));
                self.add(at, Instruction::Emit);
                return Ok(());
            }
            Instruction::SetAttr(name) => {
                self.add(at, Instruction::LoadConst(Value::from(*name)));
                self.apply(at, space::SET, 3);
                self.add(at, Instruction::DiscardTop);
                return Ok(());
            }
            Instruction::StoreLocal(_) if !in_target => self.check(at, checks::KEPT),
            Instruction::GetItem if beside_short && !constant.is_some_and(is_negative) => {}
            Instruction::GetItem => self.check_several(at, checks::ITEM, 2)?,
            Instruction::Slice => {
                self.check_several(at, checks::SLICE, 4)?;
                self.add(at, Instruction::Slice);
                self.check(at, checks::SETTLE);
                return Ok(());
            }
            Instruction::Add if beside_number => {}
            Instruction::Add => self.check_sides(at, checks::ADD, beside_short),
            Instruction::StringConcat => self.check_sides(at, checks::CONCAT, beside_short),
            Instruction::Mul => {
                self.check_several(at, checks::REPEAT, 2)?;
                self.add(at, Instruction::Mul);
                self.check(at, checks::SETTLE);
                return Ok(());
            }
            Instruction::Eq
            | Instruction::Ne
            | Instruction::Gt
            | Instruction::Gte
            | Instruction::Lt
            | Instruction::Lte
            | Instruction::CompareAndPreserve(_)
            | Instruction::In
                if beside_short => {}
            Instruction::Eq
            | Instruction::Ne
            | Instruction::Gt
            | Instruction::Gte
            | Instruction::Lt
            | Instruction::Lte => self.check_several(at, checks::COMPARE, 2)?,
            // The right side of `in` is what is looked through.
            Instruction::CompareAndPreserve(_) | Instruction::In => self.check(at, checks::LOOK),
            Instruction::PushLoop(_) | Instruction::FastRecurse => self.check(at, checks::EACH),
            // What is called may be a loop, which walks what it is given.
            Instruction::CallFunction(_, Some(1)) => self.check(at, checks::LOOK),
            // Compares what it is given with what it was given before, and keeps it.
            Instruction::CallMethod("changed", None) => {
                return Err(refused("`loop.changed` does not support unpacked arguments"));
            }
            Instruction::CallMethod("changed", Some(count)) if *count > 0 => {
                self.check_several(at, checks::REMEMBER, usize::from(*count))?;
            }
            Instruction::UnpackList(_) => self.check(at, checks::UNPACK),
            Instruction::UnpackLists(count) => {
                let lists =
                    u16::try_from(*count).map_err(|_| refused("more lists of arguments than can be counted"))?;
                self.apply(at, checks::SPLAT, lists);
                self.add(at, Instruction::UnpackLists(1));
                return Ok(());
            }
            Instruction::MergeKwargs(count) if *count > 0 => self.check_several(at, checks::KEYS, *count)?,
            Instruction::BuildMap(count) if *count > 0 => self.check_several(at, checks::KEYS, 2 * count)?,
            Instruction::FastSuper
            | Instruction::CallBlock(_)
            | Instruction::LoadBlocks
            | Instruction::Include(_)
            | Instruction::ExportLocals => {
                return Err(refused(
                    "there are no other templates: `include`, `import`, `extends` and `block` have no use",
                ));
            }
            Instruction::Lookup(_)
            | Instruction::GetAttr(_)
            | Instruction::LoadConst(_)
            | Instruction::BuildMap(_)
            | Instruction::BuildKwargs(_)
            | Instruction::MergeKwargs(_)
            | Instruction::BuildList(_)
            | Instruction::BuildTuple(_)
            | Instruction::Sub
            | Instruction::Div
            | Instruction::IntDiv
            | Instruction::Rem
            | Instruction::Pow
            | Instruction::Neg
            | Instruction::Not
            | Instruction::StoreLocal(_)
            | Instruction::ApplyFilter(..)
            | Instruction::PerformTest(..)
            | Instruction::Emit
            | Instruction::PushWith
            | Instruction::Iterate(_)
            | Instruction::PushDidNotIterate
            | Instruction::PopFrame
            | Instruction::PopLoopFrame
            | Instruction::Jump(_)
            | Instruction::JumpIfFalse(_)
            | Instruction::JumpIfFalseOrPop(_)
            | Instruction::JumpIfTrueOrPop(_)
            | Instruction::PushAutoEscape
            | Instruction::PopAutoEscape
            | Instruction::BeginCapture(_)
            | Instruction::EndCapture
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(_)
            | Instruction::DupTop
            | Instruction::DiscardTop
            | Instruction::Swap
            | Instruction::BuildMacro(..)
            | Instruction::Return
            | Instruction::IsUndefined
            | Instruction::Enclose(_)
            | Instruction::GetClosure => {}
        }
        self.add(at, instruction.clone());
        Ok(())
    }

    /// The program, with its jumps led to where their targets are now.
    fn finish(mut self) -> Instructions<'s> {
        let last = self.starts.last().copied().unwrap_or(0);
        for at in 0..self.next {
            if let Some(instruction) = self.written.get_mut(at)
                && let Some(target) = target_mut(instruction)
            {
                *target = self.starts.get(*target as usize).copied().unwrap_or(last);
            }
        }
        self.written
    }
}

/// Where an instruction jumps to.
fn target(instruction: &Instruction<'_>) -> Option<u32> {
    match instruction {
        Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::Iterate(target)
        | Instruction::BuildMacro(_, target, _) => Some(*target),
        _ => None,
    }
}

fn target_mut<'i>(instruction: &'i mut Instruction<'_>) -> Option<&'i mut u32> {
    match instruction {
        Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::Iterate(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}

/// Whether a constant is as quickly compared as a number.
fn is_short(value: &Value) -> bool {
    match (value.as_str(), value.kind()) {
        (Some(text), _) => text.len() <= SHORT,
        (None, ValueKind::Seq) => value.try_iter().is_ok_and(|mut items| {
            value.len().is_some_and(|len| len <= SHORT)
                && items.all(|item| item.as_object().is_none() && item.as_str().is_none_or(|text| text.len() <= SHORT))
        }),
        (None, ValueKind::Undefined | ValueKind::None | ValueKind::Bool | ValueKind::Number) => true,
        (None, _) => false,
    }
}

/// Whether an index is counted from the end, or lies far behind the beginning.
fn is_negative(value: &Value) -> bool {
    value.is_number() && value.as_usize().is_none_or(|index| index > SHORT)
}

fn refused(problem: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}
