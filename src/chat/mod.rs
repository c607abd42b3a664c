//! `pipeline chat`: a conversation with a model on the terminal, or for a script.

mod columns;
mod questions;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use engine::error::StageError;
use engine::limits;
use serde_json::json;
use stages::compute::inference::{CompletionText, QueuedRequest, RequestId, Sampling, StopStrings};
use stages::data::artifact::Message;
use stages::data::prompt::PromptError;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use crate::inference::{Missing, ModelArgs, Named, Opened, Room};
use crate::render::Failure;
use crate::terminal::{self, Look};
use crate::{Global, words};
use columns::Columns;
use questions::Questions;

const ANSWERS: &str = "Answers";

/// For what a conversation has said so far, so that a further question is read alone.
const PREFIX_BYTES: u64 = 256 << 20;

/// Answers that grow at once, at most.
const COMPARED: usize = 2;

const HELP: &str = "\
/system TEXT    begin with this system message; without TEXT with none
/adapter NAME   continue with another adapter; `none` is the base
/compare NAME   show the responses of another one next to it; without NAME stop that, or compare with the base
/undo           forget the last question and its answer
/reset          forget the conversation, and keep the system message
/save FILE      write the conversation as a row that can be trained on
/quit           end, as Ctrl-D does; Ctrl-C stops an answer";

/// Chat with a model, with its own chat template and streamed responses.
///
/// The model is the output of a stage, which runs first if it has no result, or a folder (`--model`). In a pipe each
/// line is a prompt, and only responses are printed on standard output. On a terminal `/help` lists the commands.
#[derive(Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Use this prompt and end; given several times, one prompt after the other in one conversation.
    #[arg(long = "prompt", value_name = "TEXT", help_heading = ANSWERS)]
    prompts: Vec<String>,
    /// In a pipe, too, take a line that begins with `/` for a command; without this every line is a prompt.
    #[arg(long)]
    commands: bool,
    /// The system message.
    #[arg(long, value_name = "TEXT", help_heading = ANSWERS)]
    system: Option<String>,
    /// Maximum number of tokens of a response [default: the model's positions].
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..), help_heading = ANSWERS)]
    max_new_tokens: Option<u32>,
    /// Divides the logits; 0 is greedy decoding.
    #[arg(long, value_name = "NUMBER", default_value_t = 0.0, help_heading = ANSWERS)]
    temperature: f64,
    /// Sample among the fewest most likely tokens whose probabilities reach this sum.
    #[arg(long, value_name = "NUMBER", help_heading = ANSWERS)]
    top_p: Option<f64>,
    /// Random seed of sampling.
    #[arg(long, value_name = "NUMBER", default_value_t = 0, help_heading = ANSWERS)]
    seed: u64,
}

/// A conversation in progress.
struct Chat<'a> {
    args: &'a ChatArgs,
    opened: Opened,
    /// Which of the models answers.
    model: Arc<Named>,
    /// Which one answers the same beside it; the conversation goes on without that.
    compared: Option<Arc<Named>>,
    system: Option<String>,
    turns: Vec<Message>,
    interrupted: Arc<AtomicBool>,
}

/// An answer in progress.
struct Growing {
    id: RequestId,
    stops: StopStrings,
    text: CompletionText,
    ids: Vec<u32>,
    is_over: bool,
}

/// What is to be shown of an answer.
enum Piece<'a> {
    More(&'a str),
    /// What is left of it at its end.
    Last(&'a str),
}

/// Talks until there are no more questions.
pub(crate) fn run(args: &ChatArgs, global: &Global) -> Result<(), Failure> {
    let opened = args.model.open(Room { sequences: COMPARED, prefix_bytes: PREFIX_BYTES }, Missing::Make, global)?;
    let interrupted = Arc::new(AtomicBool::new(false));
    let _signals = signals(Arc::clone(&interrupted))?;
    let model = opened.vocabulary.models().into_iter().next();
    let model = model.ok_or_else(|| StageError::internal("nothing was opened"))?;
    let system = args.system.clone();
    let mut chat = Chat { args, opened, model, compared: None, system, turns: Vec::new(), interrupted };
    if !args.prompts.is_empty() {
        return args.prompts.iter().try_for_each(|prompt| chat.ask(prompt));
    }
    let is_watched = io::stdin().is_terminal() && Look::stdout().live;
    let mut questions = match is_watched {
        true => Questions::edited()?,
        false => Questions::read(),
    };
    if is_watched {
        terminal::tell_line(format_args!("chatting with `{}`; /help lists the commands", chat.model.name));
    }
    while let Some(line) = questions.next()? {
        chat.interrupted.store(false, Ordering::Relaxed);
        let done = match line.trim() {
            "" => Ok(()),
            // What comes through a pipe may be anybody's: it asks, and does nothing else.
            question if !is_watched && !args.commands => chat.ask(question),
            "/quit" | "/exit" => return Ok(()),
            command if command.starts_with('/') => chat.command(command),
            question => chat.ask(question),
        };
        match done {
            // Whoever watches may correct it; a script ends with it.
            Err(failure @ Failure::Told { .. }) if is_watched => drop(crate::render::failure(&failure)),
            done => done?,
        }
    }
    Ok(())
}

/// What to do where a conversation cannot be used: here options are given, where stages have keys.
fn help(error: &PromptError) -> &'static str {
    match error {
        PromptError::NoChatTemplate => {
            "add `--chat-template chatml`, or `--tokenizer` with the folder of a chat model's tokenizer"
        }
        PromptError::Chat(_) => "`/reset` starts a new conversation, and `--chat-template` selects another template",
        PromptError::NoTemplate
        | PromptError::OtherShape
        | PromptError::ChatTemplate(_)
        | PromptError::Tokenizer(_)
        | PromptError::Weight { .. }
        | PromptError::WeightTooSmall { .. }
        | PromptError::Reasoning
        | PromptError::WeightOfUnknownTurn => "`/reset` starts a new conversation",
    }
}

/// Takes Ctrl-C for as long as the result lives: it stops an answer.
fn signals(interrupted: Arc<AtomicBool>) -> Result<Runtime, Failure> {
    let runtime = limits::event_loop(Builder::new_multi_thread().worker_threads(1));
    let runtime = runtime.map_err(Failure::machine)?;
    // From now on, not from when the task runs: the line editor puts back what was there before it.
    let mut interrupts = {
        let _within = runtime.enter();
        signal(SignalKind::interrupt()).map_err(Failure::machine)?
    };
    runtime.spawn(async move {
        while interrupts.recv().await.is_some() {
            if interrupted.swap(true, Ordering::Relaxed) {
                terminal::tell_line("\n/quit or Ctrl-D ends");
            }
        }
    });
    Ok(runtime)
}

impl Chat<'_> {
    fn command(&mut self, command: &str) -> Result<(), Failure> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("/help", _) => terminal::tell_line(HELP),
            ("/reset", _) => self.turns.clear(),
            ("/undo", _) => self.turns.truncate(self.turns.len().saturating_sub(2)),
            ("/system", "") => self.system = None,
            ("/system", text) => self.system = Some(text.to_owned()),
            ("/save", file) if !file.is_empty() => self.save(&PathBuf::from(file))?,
            ("/adapter", adapter) => self.choose(adapter)?,
            ("/compare", adapter) => self.compare(adapter)?,
            _ => return Err(Failure::wrong(format!("`{command}` is no command")).with_help(HELP)),
        }
        Ok(())
    }

    fn choose(&mut self, name: &str) -> Result<(), Failure> {
        let chosen = self.named(name)?;
        let former = std::mem::replace(&mut self.model, chosen);
        // They change places where it is the one that was compared with.
        if self.compared.as_ref().is_some_and(|compared| compared.number == self.model.number) {
            self.compared = (former.number != self.model.number).then_some(former);
        }
        Ok(())
    }

    fn compare(&mut self, name: &str) -> Result<(), Failure> {
        let name = match (name, &self.compared) {
            ("", Some(_)) => {
                self.compared = None;
                return Ok(());
            }
            ("", None) => "none",
            (name, _) => name,
        };
        let compared = self.named(name)?;
        if compared.number == self.model.number {
            let failure = Failure::wrong(format!("`{}` is selected already", compared.name));
            return Err(failure.with_help(format!("there are {}", self.known())));
        }
        self.compared = Some(compared);
        Ok(())
    }

    /// A model by its name; `none` is the base.
    fn named(&self, name: &str) -> Result<Arc<Named>, Failure> {
        let is_meant = |model: &Arc<Named>| if name == "none" { model.number == 0 } else { model.name == name };
        let found = self.opened.vocabulary.models().into_iter().find(is_meant);
        let unknown = || Failure::wrong(format!("there is no adapter `{name}`"));
        found.ok_or_else(|| unknown().with_help(format!("there are {}", self.known())))
    }

    fn known(&self) -> String {
        let names = self.opened.vocabulary.models().into_iter().map(|model| format!("`{}`", model.name));
        names.collect::<Vec<_>>().join(", ")
    }

    /// The conversation, with the system message in front.
    fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|text| Message::new("system", text));
        system.chain(self.turns.iter().cloned()).collect()
    }

    fn save(&self, file: &Path) -> Result<(), Failure> {
        let row = json!({ "messages": self.messages() });
        crate::new_file::create(file, &format!("{row}\n")).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Failure::wrong(format!("`{}` exists already", words::path(file)))
                .with_help("name another file: `/save` replaces none"),
            _ => Failure::machine(error).or_help(format!("the conversation goes to {}", words::path(file))),
        })
    }

    /// Asks a question and prints its answer as it grows. A question that cannot be asked is forgotten.
    fn ask(&mut self, question: &str) -> Result<(), Failure> {
        self.turns.push(Message::new("user", question));
        let answered = self.answer();
        match answered {
            Ok(answer) => {
                self.turns.push(Message::new("assistant", &answer));
                Ok(())
            }
            Err(failure) => {
                self.turns.pop();
                Err(failure)
            }
        }
    }

    /// Answers as often as is asked for, and returns the answer with which the conversation goes on.
    fn answer(&mut self) -> Result<String, Failure> {
        let model = Arc::clone(&self.model);
        let Some(compared) = self.compared.clone() else { return self.answer_alone(&model) };
        if let Some(columns) = Columns::new(Look::stdout()) {
            return self.answer_beside([model, compared], columns);
        }
        terminal::tell_line(format_args!("{}:", model.name));
        let answer = self.answer_alone(&model)?;
        terminal::tell_line(format_args!("\n{}:", compared.name));
        self.answer_alone(&compared)?;
        Ok(answer)
    }

    fn answer_alone(&mut self, model: &Named) -> Result<String, Failure> {
        let mut out = io::stdout();
        let mut shown = |_, piece: Piece<'_>| {
            match piece {
                Piece::More(text) => write!(out, "{}", words::visible(text))?,
                Piece::Last(text) => writeln!(out, "{}", words::visible(text))?,
            }
            out.flush()
        };
        let [answer] = self.complete([(self.request(model)?, model)], &mut shown)?;
        Ok(answer)
    }

    /// Shows the answers of two models one beside the other; returns that of the first.
    fn answer_beside(&mut self, models: [Arc<Named>; COMPARED], mut columns: Columns) -> Result<String, Failure> {
        let mut out = io::stdout();
        let head = columns.head([&models[0].name, &models[1].name]);
        writeln!(out, "{}", Look::stdout().paint("1", head.trim_end()))?;
        let mut shown = |column, piece: Piece<'_>| {
            match piece {
                Piece::More(text) => write!(out, "{}", columns.push(column, &words::visible(text)))?,
                Piece::Last(text) => {
                    let rows = columns.push(column, &words::visible(text));
                    write!(out, "{rows}{}", columns.end(column))?;
                }
            }
            out.flush()
        };
        let requests = [(self.request(&models[0])?, &*models[0]), (self.request(&models[1])?, &*models[1])];
        let [answer, _] = self.complete(requests, &mut shown)?;
        Ok(answer)
    }

    /// Asks a model the conversation so far.
    fn request(&self, model: &Named) -> Result<QueuedRequest, Failure> {
        let ChatArgs { max_new_tokens, temperature, top_p, seed, .. } = *self.args;
        let (messages, vocabulary) = (self.messages(), &self.opened.vocabulary);
        let prompt = vocabulary.conversation(model, &messages);
        let prompt = prompt.map_err(|error| {
            let help = help(&error);
            Failure::from(
                StageError::bad_data(
                    "the conversation cannot be used as a \
                prompt",
                )
                .with_source(error),
            )
            .with_help(help)
        })?;
        if prompt.len() >= vocabulary.positions {
            let message = format!(
                "the conversation has {} tokens, and the model has {} positions",
                prompt.len(),
                vocabulary.positions
            );
            return Err(Failure::wrong(message).with_help("`/undo` forgets the last question, `/reset` all of them"));
        }
        let mut request = vocabulary.request(model, prompt);
        request.max_new_tokens = max_new_tokens.map_or(usize::MAX, |most| most as usize).min(request.max_new_tokens);
        request.sampling = Sampling { temperature, top_p, seed, ..Sampling::GREEDY };
        Ok(request)
    }

    /// Completes requests at once, until all are complete or the user stops them; `shown` is given what comes of each.
    fn complete<const N: usize>(
        &mut self,
        requests: [(QueuedRequest, &Named); N],
        shown: &mut dyn FnMut(usize, Piece<'_>) -> io::Result<()>,
    ) -> Result<[String; N], Failure> {
        let mut growing = Vec::with_capacity(N);
        for (request, model) in requests {
            let id = self.opened.engine.push(request);
            let id = id.map_err(|error| {
                Failure::from(
                    StageError::bad_data(
                        "it cannot be used as a \
                    prompt",
                    )
                    .with_source(error),
                )
            })?;
            let stop_text = model.stop_text(&self.turns).map(str::to_owned);
            let stops = StopStrings::new(stop_text.as_slice());
            growing.push(Growing { id, stops, text: CompletionText::default(), ids: Vec::new(), is_over: false });
        }
        let done = self.grow(&mut growing, shown);
        growing.iter().for_each(|it| self.opened.engine.cancel(it.id));
        done?;
        let tokenizer = &self.opened.vocabulary.tokenizer;
        let whole = |it: &Growing| match it.text.stopped() {
            Some(_) => Ok(it.text.whole().to_owned()),
            None => tokenizer.decode(&it.ids),
        };
        let answers = growing.iter().map(whole).collect::<Result<Vec<_>, _>>();
        Ok(answers.map_err(StageError::from)?.try_into().expect("an answer of each request"))
    }

    fn grow(
        &mut self,
        growing: &mut [Growing],
        shown: &mut dyn FnMut(usize, Piece<'_>) -> io::Result<()>,
    ) -> Result<(), Failure> {
        let tokenizer = &self.opened.vocabulary.tokenizer;
        let finish = |index: usize, it: &mut Growing, shown: &mut dyn FnMut(usize, Piece<'_>) -> io::Result<()>| {
            it.is_over = true;
            it.text.finish(tokenizer, &it.stops).map_err(StageError::from)?;
            Ok::<_, Failure>(shown(index, Piece::Last(it.text.take_rest()))?)
        };
        while growing.iter().any(|it| !it.is_over) && !self.interrupted.swap(false, Ordering::Relaxed) {
            for progress in self.opened.engine.step()? {
                let Some(index) = growing.iter().position(|it| it.id == progress.id) else { continue };
                let it = &mut growing[index];
                if let Some(token) = progress.token {
                    it.ids.push(token.id);
                    it.text.push(token.id, tokenizer, &it.stops).map_err(StageError::from)?;
                    shown(index, Piece::More(it.text.take_settled(&it.stops)))?;
                }
                if it.text.stopped().is_some() && !it.is_over {
                    self.opened.engine.cancel(it.id);
                    finish(index, it, shown)?;
                    continue;
                }
                if let Some(ended) = progress.ended {
                    ended.map_err(|error| StageError::bad_data("no next token can be chosen").with_source(error))?;
                    finish(index, it, shown)?;
                }
            }
        }
        let stopped = growing.iter_mut().enumerate().filter(|(_, it)| !it.is_over);
        stopped.into_iter().try_for_each(|(index, it)| finish(index, it, shown))
    }
}
