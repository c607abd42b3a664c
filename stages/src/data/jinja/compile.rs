//! From the text of a template to a program that can be run: parsed, compiled and given its checks on a stack of its
//! own, whose depth the limits on the text bound.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use minijinja::machinery::{self, CodeGenerator, Instructions, Token};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::measure::{measure, settled};
use super::meter::{self, Limit};
use super::{fold, instrument, names};

/// The longest text of a template: the longest chat templates have some 30 KB.
const LONGEST: usize = 1 << 20;

/// Words of a template, and of one `{{ … }}` or `{% … %}`: the parser goes down a level for a few of them.
const MOST_WORDS: usize = 200_000;
const MOST_WORDS_IN_A_TAG: usize = 4_000;

/// How many `elif` a template may have: each lies within the one before it.
const MOST_ELIF: usize = 1_000;

/// What errors call a text; its readers know which one it is.
const NAME: &str = "template";

/// The stack on which templates are compiled: some 4 KB for each level that the limits leave.
const STACK: usize = 64 << 20;

/// What a text is.
#[derive(Debug, Clone)]
pub(crate) enum Form {
    /// An expression, whose value keeps its type.
    Expression,
    /// A text with expressions in it.
    Template(SyntaxConfig),
}

/// A compiled template or expression.
pub(crate) struct Program<'s> {
    instructions: Instructions<'s>,
    size_hint: usize,
}

impl<'s> Program<'s> {
    /// Compiles a text.
    ///
    /// # Errors
    /// Fails where it has a mistake or is too large or too deep.
    pub(crate) fn compile(source: &'s str, form: &Form) -> Result<Self, Error> {
        check_words(source, form)?;
        on_deep_stack(|| {
            let mut generator = CodeGenerator::new(NAME, source);
            match form {
                Form::Expression => {
                    let expression = machinery::parse_expr(source)?;
                    fold::check_expression(&expression)?;
                    generator.compile_expr(&expression);
                }
                Form::Template(syntax) => {
                    let template = machinery::parse(source, NAME, syntax.clone())?;
                    fold::check_template(&template)?;
                    generator.compile_stmt(&template);
                }
            }
            let size_hint = generator.buffer_size_hint().min(1 << 16);
            let (instructions, blocks) = generator.finish();
            if !blocks.is_empty() {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "there are no other templates, so `block` has no use",
                ));
            }
            Ok(Self { instructions: instrument::with_checks(&instructions)?, size_hint })
        })
    }

    /// Refuses a filter or a test that an environment lacks, which else fails when it is met.
    ///
    /// # Errors
    /// Fails where the text names one.
    pub(crate) fn check_names(&self, environment: &Environment<'_>) -> Result<(), Error> {
        names::check(&self.instructions, environment)
    }

    /// The names that a text looks for and does not give itself, with what it looks for in them: `row.name`.
    pub(crate) fn names(source: &'s str, form: &Form, environment: &'s Environment<'s>) -> Vec<String> {
        let names = on_deep_stack(|| {
            Ok(match form {
                Form::Expression => environment.compile_expression(source)?.undeclared_variables(true),
                Form::Template(_) => environment.template_from_str(source)?.undeclared_variables(true),
            })
        });
        let mut names: Vec<String> = names.into_iter().flatten().collect();
        names.sort();
        names
    }

    /// The text that a template makes, within the limits.
    ///
    /// # Errors
    /// Fails where the template does, or meets a limit.
    pub(crate) fn render(
        &self,
        environment: &'s Environment<'s>,
        context: impl FnOnce() -> Value,
    ) -> Result<String, Error> {
        within_limits(|| {
            let mut text = String::with_capacity(self.size_hint);
            self.run(environment, context(), &mut text)?;
            Ok(text)
        })
    }

    /// What `finish` makes of the value of an expression, which is worked out to its end and as small as the limits
    /// say.
    ///
    /// # Errors
    /// Fails where the expression does, or meets a limit.
    pub(crate) fn value<T>(
        &self,
        environment: &'s Environment<'s>,
        context: impl FnOnce() -> Value,
        finish: impl FnOnce(Value) -> Result<T, Error>,
    ) -> Result<T, Error> {
        within_limits(|| {
            let value = self.run(environment, context(), &mut String::new())?;
            let value = settled(value.unwrap_or_default())?;
            if value.as_object().is_some() {
                meter::made(measure(&value)?.copied())?;
            }
            finish(value)
        })
    }

    fn run(&self, environment: &'s Environment<'s>, context: Value, text: &mut String) -> Result<Option<Value>, Error> {
        let mut output = machinery::make_string_output(text);
        let blocks = BTreeMap::new();
        let escape = AutoEscape::None;
        let (value, _) = machinery::eval(environment, &self.instructions, context, &blocks, &mut output, escape)?;
        Ok(value)
    }
}

/// Does some work on an account of its own. The engine panics over some things that Python takes (an empty list walked
/// backwards).
fn within_limits<T>(work: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    let (result, met) = meter::on_account(|| catch_unwind(AssertUnwindSafe(work)));
    match (met, result) {
        (Some(limit), _) => Err(limit.error()),
        (None, Ok(Err(error))) if error.kind() == ErrorKind::OutOfFuel => Err(Limit::Steps.error()),
        (None, Ok(result)) => result,
        (None, Err(_)) => Err(Error::new(ErrorKind::InvalidOperation, "the template engine failed over it")),
    }
}

/// Refuses a text before it is parsed that the parser would go too deep in.
fn check_words(source: &str, form: &Form) -> Result<(), Error> {
    let too = |problem: String| Err(Error::new(ErrorKind::SyntaxError, problem));
    if source.len() > LONGEST {
        return too(format!("it is longer than {} MiB", LONGEST >> 20));
    }
    let (in_expression, syntax) = match form {
        Form::Expression => (true, SyntaxConfig::default()),
        Form::Template(syntax) => (false, syntax.clone()),
    };
    let (mut words, mut in_tag, mut elif) = (0, 0, 0);
    for word in machinery::tokenize(source, in_expression, syntax) {
        // What is wrong with it the parser tells with its place.
        let Ok((word, _)) = word else { break };
        words += 1;
        in_tag += 1;
        match word {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => in_tag = 0,
            Token::Ident("elif") => elif += 1,
            _ => {}
        }
        if words > MOST_WORDS || in_tag > MOST_WORDS_IN_A_TAG || elif > MOST_ELIF {
            let what = format!(
                "it is too long: at most {MOST_WORDS} words, {MOST_WORDS_IN_A_TAG} of them in one expression, and {MOST_ELIF} `elif`"
            );
            return too(what);
        }
    }
    Ok(())
}

/// Does some work on a thread with a stack that is deep enough for what the limits let through.
fn on_deep_stack<T: Send>(work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let failed = |problem: &'static str| Error::new(ErrorKind::InvalidOperation, problem);
    std::thread::scope(|scope| {
        let thread =
            std::thread::Builder::new().name("template".to_owned()).stack_size(STACK).spawn_scoped(scope, work);
        match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err(failed("the template engine failed over it"))),
            Err(_) => Err(failed("no thread can be started to compile it")),
        }
    })
}
