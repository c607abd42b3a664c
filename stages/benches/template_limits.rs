//! What the limits of templates cost for each row, beside minijinja without them.
//!
//! `cargo bench -p stages --bench template_limits` prints a line for each template: processor time of one row, the
//! least of five rounds.

#[path = "../src/data/jinja/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the module of the library itself, of which this uses a part")]
mod jinja;

use std::time::Duration;

use jinja::{Form, Program, bound};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, Value, context};

const ROWS: u32 = 20_000;

const TEMPLATES: [(&str, &str); 3] = [
    ("two columns", "{{ title }}: {{ text }}"),
    ("a method and a filter", "{{ title.strip()|upper }}: {{ text[:200]|replace('s', 'z') }}"),
    (
        "six turns of ChatML",
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
         {% endfor %}",
    ),
];

fn main() -> Result<(), Error> {
    let mut bounded = Environment::new();
    bound(&mut bounded);
    let mut own = Environment::new();
    own.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    let row = row();
    for (name, source) in TEMPLATES {
        let template = own.template_from_str(source)?;
        let program = Program::compile(source, &Form::Template(SyntaxConfig::default()))?;
        let without = time(|| template.render(row.clone()))?;
        let within = time(|| program.render(&bounded, || row.clone()))?;
        println!("{name}: {without:?} without limits, {within:?} within them");
    }
    Ok(())
}

/// Texts of 1.2 KB, and a conversation of six turns with 480 bytes each.
fn row() -> Value {
    let role = |at: usize| if at.is_multiple_of(2) { "user" } else { "assistant" };
    let messages: Vec<Value> =
        (0..6).map(|at| context! { role => role(at), content => "Some words. ".repeat(40) }).collect();
    context! { messages, text => "Some words. ".repeat(100), title => "A title", n => 3 }
}

fn time(render: impl Fn() -> Result<String, Error>) -> Result<Duration, Error> {
    let mut least = Duration::MAX;
    for _ in 0..5 {
        let begin = busy();
        for _ in 0..ROWS {
            assert!(!render()?.is_empty());
        }
        least = least.min((busy() - begin) / ROWS);
    }
    Ok(least)
}

/// How long this thread has been computing, whatever else the machine does.
fn busy() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    Duration::from_nanos(text.split(' ').next().and_then(|time| time.parse().ok()).unwrap_or_default())
}
