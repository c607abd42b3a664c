//! Each thing that is built in, asked for far more than there is: refused at a limit, at once.

use std::time::{Duration, Instant};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Value, context};

use super::{Form, Program, bound};

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    bound(&mut environment);
    environment
}

fn values() -> Value {
    let deep = (0..120).fold(Value::from(1), |inner, _| Value::from(vec![inner]));
    context! {
        text => "hello, world of long lines\nand more",
        long => "l".repeat(100_000),
        words => ["b", "a", "c"],
        object => context! { a => 1, b => [1, 2] },
        deep => deep,
    }
}

fn rendered(source: &'static str) -> Result<String, String> {
    let told = |error: minijinja::Error| error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let environment: &'static Environment<'static> = Box::leak(Box::new(environment()));
    let program = Program::compile(source, &Form::Template(SyntaxConfig::default())).map_err(told)?;
    program.render(environment, values).map_err(told)
}

fn worked_out(source: &'static str) -> Result<String, String> {
    let told = |error: minijinja::Error| error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    let environment: &'static Environment<'static> = Box::leak(Box::new(environment()));
    let program = Program::compile(source, &Form::Expression).map_err(told)?;
    program.value(environment, values, |value| Ok(value.to_string())).map_err(told)
}

/// That a template meets a limit, and how soon.
fn met(source: &'static str) -> String {
    let begin = busy();
    let result = rendered(source);
    let took = busy() - begin;
    let problem = result.map(|text| text.len()).expect_err(source);
    assert!(took < Duration::from_secs(3), "{source}: {took:?}, {problem}");
    problem
}

/// How long this thread has been computing, whatever else the machine does.
fn busy() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

#[test]
fn numbers_in_a_format_are_no_widths() {
    for (source, expected) in [
        ("{{ '{} views'.format(1764331200) }}", "1764331200 views"),
        ("{{ '%d'|format(1764331200) }}", "1764331200"),
        ("{{ '{{}} {}'.format(1764331200) }}", "{} 1764331200"),
    ] {
        assert_eq!(rendered(source).as_deref(), Ok(expected), "{source}");
    }
    met("{{ '%*d'|format(1764331200, 1) }}");
    met("{{ '{:{}}'.format(1, 1764331200) }}");
}

const BYTES: &str = "makes a string of more than 256 MiB";
const STEPS: &str = "needs more than 10000000 steps";

#[test]
fn what_makes_too_much_is_refused_before_it_is_made() {
    for source in [
        "{{ '%2000000000s'|format(text) }}",
        "{{ '%*s'|format(2000000000, text) }}",
        "{{ '%.2000000000f'|format(1.5) }}",
        "{{ '{:2000000000}'.format(text) }}",
        "{{ '{:{}}'.format(text, 2000000000) }}",
        "{{ '{0}{0}{0}{0}{0}{0}{0}{0}{0}'.format(text * 1000000) }}",
        "{{ (text * 10000).replace('l', text * 10000) }}",
        "{{ (text * 10000)|replace('', text * 10000) }}",
        "{{ range(90000)|join(text * 10000) }}",
        "{{ (text * 1000000).join(range(1000)) }}",
        "{{ text|batch(1000000000, 1)|list|length }}",
        "{{ text|slice(1000000000)|list|length }}",
        "{{ text.center(2000000000) }}",
        "{{ text.ljust(2000000000, '→') }}",
        "{{ text.rjust(2000000000) }}",
        "{{ text.zfill(2000000000) }}",
        "{{ ('\t' * 100000).expandtabs(100000) }}",
        "{{ ('\t' * 100000).expandtabs(tabsize=100000) }}",
        "{{ (long * 100).rsplit('l')|length }}",
        "{{ text|indent(2000000000) }}",
        "{{ text|indent(width=2000000000, first=true) }}",
        "{{ object|tojson(indent=2000000000) }}",
        "{{ object|tojson(2000000000) }}",
        "{{ text * 100000000 }}",
        "{{ [text] * 100000000 }}",
        "{{ (range(100000) * 1000)|list|length }}",
        "{% set a, b = range(100000) * 1000 %}{{ a }}",
        "{{ range(*(range(100000) * 1000)) }}",
        "{{ (long * 100)|split('l')|length }}",
        "{{ (long * 100).split('l')|length }}",
        "{{ (long * 100)|list|length }}",
        "{{ (long * 100)|unique }}",
        "{{ (long * 1000)|upper }}{{ (long * 1000)|upper }}",
        "{{ [long, long, long] | map('replace', 'l', long) | list | length }}",
        "{% set x = text %}{% for i in range(60) %}{% set x %}{{ text }}{% endset %}{% endfor %}\
         {% set n = namespace(x=text) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=text) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=[text]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
        "{% set n = namespace(x=[]) %}{% for i in range(100000) %}{% set n.x = n.x + [[]] %}{% endfor %}",
        "{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='a') %}\
         {% for i in range(60) %}{% set n.x = twice(n.x) %}{% endfor %}",
        "{% for a in range(100000) %}{{ long }}{% endfor %}",
        "{% for a in range(100000) %}{{ [long] }}{% endfor %}",
        "{% filter upper %}{% for a in range(100000) %}{{ long }}{% endfor %}{% endfilter %}",
        "{% autoescape 'json' %}{% for a in range(100000) %}{{ [long] }}{% endfor %}{% endautoescape %}",
    ] {
        let problem = met(source);
        assert!(problem == BYTES || problem == STEPS, "{source}: {problem}");
    }
}

#[test]
fn what_looks_through_too_much_takes_too_many_steps() {
    for source in [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{{ long[99999] }}{% endfor %}",
        "{% for a in range(100000) %}{{ long[-1] }}{% endfor %}",
        "{% for a in range(100000) %}{% if long == long ~ '' %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% if 'x' in long %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% if 'x' not in long %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% if long is lower %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% for c in long %}{% break %}{% endfor %}{% endfor %}",
        "{{ long.strip('b' * 100000 ~ 'l') }}",
        "{{ long|trim('b' * 100000 ~ 'l') }}",
        "{% for a in range(100000) %}{% if loop.changed(long) %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% if long.count('x') %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% if long.find('x') %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% if long.rindex('l', 5) %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% if long.partition('x') %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% if long.removeprefix('x') %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{% if long.casefold() %}{% endif %}{% endfor %}",
        "{% for a in range(100000) %}{{ long|length }}{% endfor %}",
        "{% for a in range(100000) %}{{ long.isalpha() }}{% endfor %}",
        "{% for a in range(100000) %}{{ {long: 1}|length }}{% endfor %}",
        "{% for a in range(100000) %}{{ object[long] }}{% endfor %}",
        "{% for a in range(100000) %}{{ range(100000)[99999] }}{% endfor %}",
        "{% set l = range(100000)|list %}{% for a in l %}{{ l == l ~ '' }}{% endfor %}",
        "{% set l = range(100000)|list %}{% for a in l %}{{ l|sort|first }}{% endfor %}",
        "{% set l = range(100000)|list %}{% for a in l %}{{ l|select('in', l)|first }}{% endfor %}",
        // A value that holds itself twice, thirty times over.
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% for a in range(100000) recursive %}{% if loop.depth < 3 %}{{ loop(range(100000)) }}{% endif %}{% endfor %}",
    ] {
        let problem = met(source);
        assert!(problem == STEPS || problem == BYTES, "{source}: {problem}");
    }
}

#[test]
fn nothing_is_nested_deeper_than_it_can_be_dropped() {
    for source in [
        "{% set n = namespace(x=1) %}{% for i in range(100000) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=1) %}{% for i in range(100000) %}{% set n.x = (n.x,) %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=1) %}{% for i in range(100000) %}{% set n.x = {'a': n.x} %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=1) %}{% for i in range(100000) %}{% set n.x = dict(a=n.x) %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(100000) %}{% set n.x = n.x|batch(1)|list %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(100000) %}{% set n.x = [n.x]|zip([1])|list %}{% endfor %}",
        "{% set n = namespace(x={}) %}{% for i in range(100000) %}{% set n.x = [n.x|chain({'a': n.x})] %}{% endfor %}",
        "{% macro f(x) %}{{ f([[[[[[[[[x]]]]]]]]]) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ] {
        let problem = met(source);
        assert!(
            problem.contains("nested deeper than 200") || problem.contains("recursion limit"),
            "{source}: {problem}"
        );
    }
    let chain: &'static str = Box::leak(("{{ words".to_owned() + &"|batch(1)".repeat(700) + " }}").into_boxed_str());
    assert!(met(chain).contains("nested deeper than 200"));
    // Wrapped a hundred thousand times, and no deeper than one list.
    for source in [
        "{% set n = namespace(x=[1, 2]) %}{% for i in range(100000) %}{% set n.x = n.x[0:] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1, 2]) %}{% for i in range(100000) %}{% set n.x = n.x|reverse %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1, 2]) %}{% for i in range(100000) %}{% set n.x = n.x * 1 %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x={'a': 1}) %}{% for i in range(50000) %}{% set n.x = n.x|chain({'b': 2}) %}{% endfor %}{{ n.x }}",
    ] {
        let text = rendered(source);
        assert!(text.as_ref().is_ok_and(|text| text.len() < 40), "{source}: {text:?}");
    }
    assert!(rendered("{{ deep }}").unwrap().starts_with("[[[["));
}

#[test]
fn a_namespace_holds_only_what_is_older() {
    for source in [
        "{% set n = namespace() %}{% set n.x = n %}{{ n }}",
        "{% set n = namespace() %}{% set n.x = [{'a': n}] %}{{ n }}",
        "{% set n = namespace() %}{% set m = namespace(n=n) %}{% set n.m = m %}{{ n }}",
    ] {
        assert!(met(source).contains("a later namespace, nor itself"), "{source}");
    }
    for source in [
        "{% set n = namespace() %}{% for x in [n] %}{% set n.l = [loop] %}{% endfor %}",
        "{% for x in words %}{{ loop.changed([loop]) }}{% endfor %}",
    ] {
        assert!(met(source).contains("loop"), "{source}");
    }
    let outer = "{% for x in words %}{% set outer = loop %}{% for y in 'ab' %}{{ outer.index }}{{ loop.changed(x) }}{% endfor %}{% endfor %}";
    assert_eq!(rendered(outer).unwrap(), "1True1False2True2False3True3False");
    let held = "{% set n = namespace(x=1) %}{% set m = namespace(n=n) %}{% set n.x = 2 %}{{ m.n.x }}{{ m }}";
    assert_eq!(rendered(held).unwrap(), "2{'n': {'x': 2}}");
    // Each in a list that was measured when the namespace in it was empty.
    let chain: String = (1..2000).fold("{% set n0 = namespace(x=1) %}".to_owned(), |source, at| {
        let before = at - 1;
        source + &format!("{{% set n{at} = namespace(x=range(1)|map('default')|list + [n{before}]) %}}")
    });
    let problem = met(Box::leak((chain + "{{ n1999 }}").into_boxed_str()));
    assert!(problem.contains("nested deeper than 200"), "{problem}");
}

#[test]
fn no_text_goes_too_deep_in_the_parser() {
    let repeated = |before: &str, part: &str, count: usize, after: &str| {
        let source: String = before.to_owned() + &part.repeat(count) + after;
        let source: &'static str = Box::leak(source.into_boxed_str());
        source
    };
    for source in [
        repeated("", "-", 20_000, "1"),
        repeated("", "not ", 100_000, "1"),
        repeated("", "(", 100_000, "1"),
        repeated("", "[", 20_000, "1"),
        repeated("1", "+1", 300_000, ""),
        repeated("1", "~1", 300_000, ""),
        repeated("1", "|abs", 200_000, ""),
        repeated("a", ".a", 200_000, ""),
        repeated("a", "[0]", 200_000, ""),
        repeated("1", " if 1 else 1", 100_000, ""),
    ] {
        let begin = Instant::now();
        let problem = worked_out(source).unwrap_err();
        assert!(begin.elapsed() < Duration::from_secs(2), "{}", &source[..20]);
        let told = ["too long", "longer than 1 MiB", "recursion limits"];
        assert!(told.iter().any(|told| problem.contains(told)), "{problem}");
    }
    let elif = repeated("{% if a %}", "{% elif a %}", 20_000, "{% endif %}");
    let nested = repeated("", "{% if a %}", 20_000, "");
    for source in [elif, nested] {
        let problem = met(source);
        assert!(problem.contains("too long") || problem.contains("recursion limits"), "{problem}");
    }
    // What the limits let through is compiled, run and dropped.
    for source in [
        repeated("", "-", 3_900, "1"),
        repeated("1", "+1", 1_900, ""),
        repeated("text", "~text", 1_900, ""),
        repeated("text", "|upper", 1_900, ""),
        repeated("words", "[0:]", 900, ""),
        repeated("words", "+words", 900, ""),
        repeated("0", " if text else 1", 900, ""),
        repeated("text", " and text", 1_900, ""),
    ] {
        let begin = Instant::now();
        assert!(worked_out(source).is_ok(), "{}", &source[..20]);
        assert!(begin.elapsed() < Duration::from_secs(2), "{}: {:?}", &source[..20], begin.elapsed());
    }
}

#[test]
fn constants_are_not_worked_out_without_bounds() {
    for source in [
        "'a' * 100000000 ~ 'a' * 100000000 ~ 'a' * 100000000 ~ text",
        "text ~ ('a' * 1000 * 1000 * 1000)",
        "text ~ ('a' * 10 ** 9)",
        "[1] * 100000000",
        "text if ('a' * 100000000) == text else 1",
        "text|replace('a' * 100000000, '')",
    ] {
        let begin = Instant::now();
        let problem = worked_out(source).unwrap_err();
        assert!(problem.contains("constants come to more than 1 MiB"), "{source}: {problem}");
        assert!(begin.elapsed() < Duration::from_secs(1), "{source}");
    }
    assert_eq!(worked_out("'-' * 80 == '-' * 40 * 2").unwrap(), "True");
    assert_eq!(worked_out("1000000 * 1000000 * 1000000").unwrap(), "1000000000000000000");
}

#[test]
fn the_value_of_an_expression_is_within_the_limits() {
    for source in ["range(100000) * 1000", "[text * 2000000] * 30", "[long] * 3000"] {
        let begin = busy();
        let problem = worked_out(source).unwrap_err();
        assert!(problem == BYTES || problem == STEPS, "{source}: {problem}");
        assert!(busy() - begin < Duration::from_secs(3), "{source}");
    }
}

#[test]
fn other_templates_are_refused() {
    for source in ["{% include 'x' ignore missing %}", "{% extends 'x' %}", "{% block a %}{{ self.a() }}{% endblock %}"]
    {
        assert!(met(source).contains("no other templates"), "{source}");
    }
    // The engine divides by the number of arguments.
    assert!(met("{% for x in words %}{{ loop.cycle() }}{% endfor %}").contains("failed over it"));
}

/// What minijinja gives without limits, it gives with them.
#[test]
fn results_are_those_of_the_engine_itself() {
    let bounded: &'static Environment<'static> = Box::leak(Box::new(environment()));
    let mut own = Environment::new();
    own.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    for source in [
        "{{ text }}|{{ text|upper }}|{{ text.title() }}|{{ text[3:9] }}|{{ text[-1] }}|{{ text[::-1] }}",
        "{{ words|join(', ') }} {{ words|sort }} {{ words[1:] }} {{ words[1:][0] }} {{ words + ['d'] }} {{ words * 2 }}",
        "{% for word in words if word != 'a' %}{{ loop.index }}/{{ loop.length }}:{{ word }}{{ ', ' if not loop.last }}{% else %}-{% endfor %}",
        "{% for key, value in object|items %}{{ key }}={{ value }};{% endfor %}{% for k, v in object.items() %}{{ k }}{% endfor %}",
        "{% set n = namespace(x=0, l=[]) %}{% for word in words %}{% set n.x = n.x + 1 %}{% set n.l = n.l + [word] %}{% endfor %}{{ n.x }}{{ n.l }}",
        "{% macro greet(name, mark='!') %}Hi {{ name }}{{ mark }}{% endmacro %}{{ greet('a') }}{{ greet(name='b', mark='?') }}{{ greet(*['c'], **{'mark': '.'}) }}",
        "{% macro each() %}{% for w in words %}{{ caller(w) }}{% endfor %}{% endmacro %}{% call(w) each() %}<{{ w }}>{% endcall %}",
        "{% set a, b = [1, 2] %}{{ a + b }} {{ a ~ b }} {{ a < b < 3 }} {{ 1 in [1, 2] }} {{ 'ello' in text }} {{ a not in [3] }}",
        "{% set block %}<{{ text }}>{% endset %}{{ block|length }}{% filter upper %}x{{ text }}{% endfilter %}",
        "{{ words|map('upper')|list }}{{ words|select('in', ['a', 'b'])|list }}{{ [{'a': 1}, {'a': 2}]|map(attribute='a')|sum }}",
        "{{ '%s-%05.1f-%d'|format('x', 1.25, 7) }}{{ '{:>5}|{name}'.format('a', name='b') }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ -7 / 2 }}",
        "{{ object|tojson }}{{ object|tojson(indent=1) }}{{ object|dictsort }}{{ object|pprint }}{{ object }}",
        "{{ range(5)|list }}{{ range(5) }}{{ range(5)[2] }}{{ range(5)|last }}{{ (1, 2) + (3,) }}{{ words|batch(2, '-')|list }}{{ words|slice(2)|list }}",
        "{{ text|replace('l', 'L') }}{{ text.replace('l', 'L', 1) }}{{ text.split(',') }}{{ text.splitlines() }}{{ text|lines }}{{ text|indent(2) }}",
        "{{ dict(a=1, b=2) }}{{ {'a': 1}|chain({'b': 2}) }}{{ words|zip([1, 2, 3])|list }}{{ words|groupby('x')|length }}{{ words|unique }}",
        "{% for i in range(3) recursive %}{{ i }}{% if i > 0 and loop.depth < 3 %}({{ loop(range(i)) }}){% endif %}{% endfor %}",
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% with x = 1, y = x %}{{ x }}{{ y }}{% endwith %}{% if words and text %}t{% else %}f{% endif %}{{ none }}{{ missing|default('d') }}",
        "{% autoescape true %}{{ '<a>' }}{{ ['<b>'] }}{{ '<c>'|safe }}<d>{% endautoescape %}{{ '<e>'|e }}",
        "{{ [3, 1, 2]|sort(reverse=true) }}{{ [1.5, 2]|max }}{{ words|first }}{{ words|reverse|list }}{{ 'abc'|reverse }}{{ 3.7|round }}{{ '12'|int + 1 }}",
        "{{ text is string }}{{ words is sequence }}{{ words[0] is eq 'b' }}{{ 4 is divisibleby 2 }}{{ object.b[1] }}{{ object['a'] }}{{ object.get('z', 3) }}",
        "{{ words }}{{ words[0] if words|length > 2 else text }}{{ 'a' if missing is defined else 'b' }}{{ 1 == 1.0 }}{{ words == ['b', 'a', 'c'] }}",
    ] {
        let program = Program::compile(source, &Form::Template(SyntaxConfig::default())).unwrap();
        let told = |error: minijinja::Error| (error.kind(), error.detail().map(str::to_owned), error.line());
        let expected = own.render_str(source, values()).map_err(told);
        assert_eq!(program.render(bounded, values).map_err(told), expected, "{source}");
    }
}

/// The library ends the process over some of these, and takes others for something else.
#[test]
fn titles_and_lines_are_pythons() {
    for (source, expected) in [
        ("{{ \"a_b </think> don't 3rd\".title() }}", "A_B </Think> Don'T 3Rd"),
        (
            "{{ \"\\x1c a\\x1f \".strip() }}|{{ \"\\x1ca\\x1eb \".split() }}|{{ \" a\\x1d\".lstrip() ~ \"\\x1d\".rstrip() }}",
            "a|['a', 'b']|a\x1d",
        ),
        ("{{ \"a\\u2028b\\x0cc\\r\\nd\".splitlines()|join('|') }}", "a|b|c|d"),
        ("{{ \"a\\n\\nb\\n\".splitlines(true)|join('|') }}", "a\n|\n|b\n"),
        ("{{ ''.splitlines()|length }}", "0"),
    ] {
        assert_eq!(rendered(source).as_deref(), Ok(expected), "{source}");
    }
}

/// As jinja2 renders them, set up as transformers does.
#[test]
fn methods_of_strings_are_pythons() {
    for (source, expected) in [
        (
            "{{ 'ab'.center(5) }}|{{ 'ab'.center(5, '*') }}|{{ 'abc'.center(6, '*') }}|{{ 'é'.center(4, '→') }}",
            "  ab |**ab*|*abc**|→é→→",
        ),
        (
            "{{ 'abc'.center(2) }}|{{ 'ab'.center(-1) }}|{{ 'ab'.ljust(4, '.') }}|{{ 'ab'.rjust(4) }}",
            "abc|ab|ab..|  ab",
        ),
        ("{{ 'é'.rjust(3, '0') }}|{{ '-7'.zfill(4) }}|{{ '+é'.zfill(4) }}|{{ ''.zfill(2) }}", "00é|-007|+00é|00"),
        ("{{ '42'.zfill(1) }}|{{ '7'.zfill(3) }}", "42|007"),
        ("{{ 'a=b=c'.partition('=') }}{{ 'a=b=c'.rpartition('=') }}", "('a', '=', 'b=c')('a=b', '=', 'c')"),
        ("{{ 'abc'.partition('=') }}{{ 'abc'.rpartition('=') }}", "('abc', '', '')('', '', 'abc')"),
        ("{{ '<|x|>y'.removeprefix('<|x|>') }}{{ 'y'.removeprefix('z') }}", "yy"),
        ("{{ 'ab.txt'.removesuffix('.txt') }}{{ 'ab'.removesuffix('') }}", "abab"),
        ("{{ 'héllo'.find('l') }}{{ 'héllo'.rfind('l') }}{{ 'héllo'.index('l') }}{{ 'héllo'.rindex('l') }}", "2323"),
        ("{{ 'héllo'.index('l', 3) }}{{ 'héllo'.find('l', 0, 2) }}{{ 'héllo'.find('h', -5, -4) }}", "3-10"),
        ("{{ 'abc'.find('', 3) }}{{ 'abc'.find('', 4) }}{{ 'abc'.rfind('') }}{{ 'abc'.find('a', -99) }}", "3-130"),
        ("{{ 'abc'.rfind('c', none, -1) }}{{ 'abc'.find('c', 2, none) }}{{ 'abcabc'.rindex('a', 0, 4) }}", "-123"),
        ("{{ 'abc'.find('a', 2, 1) }}", "-1"),
        ("{{ 'Straße ẞ ſ ı İ ς'.casefold() }}|{{ 'aB ßÄé1'.swapcase() }}", "strasse ss s ı i\u{307} σ|Ab SSäÉ1"),
        ("{{ 'a\\tb\\n\\tc'.expandtabs() }}|{{ 'a\\tb'.expandtabs(4) }}", "a       b\n        c|a   b"),
        ("{{ 'ab\\tc'.expandtabs(0) }}|{{ '\\té\\tc\\r\\td'.expandtabs(3) }}", "abc|   é  c\r   d"),
        ("{{ 'a\\tb'.expandtabs(-2) }}|{{ 'a\\tb'.expandtabs(tabsize=2) }}", "ab|a b"),
        ("{{ 'a b  c '.rsplit() }}{{ ''.rsplit() }}{{ ''.rsplit('-') }}", "['a', 'b', 'c'][]['']"),
        ("{{ 'a-b-c'.rsplit('-', 1) }}{{ ' a b  c '.rsplit(none, 1) }}", "['a-b', 'c'][' a b', 'c']"),
        ("{{ 'aaa'.rsplit('aa') }}{{ 'a b c'.rsplit(none, 0) }}", "['a', '']['a b c']"),
        ("{{ 'a-b-c'.rsplit('-', -1) }}{{ 'a-b-c'.rsplit('-', maxsplit=1) }}", "['a', 'b', 'c']['a-b', 'c']"),
        ("{{ 'a-b-c'.split('-', maxsplit=1) }}{{ 'a-b-c'.split(sep='-', maxsplit=1) }}", "['a', 'b-c']['a', 'b-c']"),
        ("{{ 'a b c'.split(maxsplit=1) }}{{ 'a-b'.split(sep='-') }}", "['a', 'b c']['a', 'b']"),
    ] {
        assert_eq!(rendered(source).as_deref(), Ok(expected), "{source}");
    }
    for call in [
        "index('y')",
        "rindex('y')",
        "partition('')",
        "rsplit('')",
        "center('5')",
        "center(5, 'ab')",
        "center(5, '')",
        "center(1.5)",
        "center()",
        "zfill('a')",
        "removeprefix(1)",
        "find()",
        "swapcase(1)",
        "split('x', sep='x')",
        "rsplit(seperator='x')",
    ] {
        let source: &'static str = Box::leak(format!("{{{{ 'x'.{call} }}}}").into_boxed_str());
        assert!(rendered(source).is_err(), "{source}");
    }
}

#[test]
fn slices_backwards_are_pythons() {
    let bounds: Vec<String> = std::iter::once(String::new()).chain((-5..=5).map(|bound| bound.to_string())).collect();
    let python = |length: i64, start: &str, stop: &str, step: i64| -> Vec<i64> {
        let clamp = |bound: &str, left_out: i64| match bound.parse::<i64>() {
            Err(_) => left_out,
            Ok(bound) if bound < 0 => (bound + length).max(-1),
            Ok(bound) => bound.min(length - 1),
        };
        let (mut at, end) = (clamp(start, length - 1), clamp(stop, -1));
        let mut places = Vec::new();
        while at > end {
            places.push(at);
            at += step;
        }
        places
    };
    assert_eq!(python(3, "", "", -1), [2, 1, 0]);
    assert_eq!(python(3, "-9", "", -1), [] as [i64; 0]);
    assert_eq!(python(4, "3", "0", -2), [3, 1]);
    for (start, stop) in bounds.iter().flat_map(|start| bounds.iter().map(move |stop| (start, stop))) {
        for (length, step) in (0..4).flat_map(|length| [-1, -2, -9].map(|step| (length, step))) {
            let places = python(length, start, stop, step);
            let letters = &"abc"[..length as usize];
            let taken: String = places.iter().map(|place| letters.as_bytes()[*place as usize] as char).collect();
            let list: Vec<i64> = (0..length).collect();
            for (value, items) in [(Value::from(letters), "text"), (Value::from(list), "list")] {
                let source = format!("{{{{ value[{start}:{stop}:{step}] }}}}");
                let program = Program::compile(&source, &Form::Template(SyntaxConfig::default())).unwrap();
                let environment: &'static Environment<'static> = Box::leak(Box::new(environment()));
                let found = program.render(environment, || context! { value => value.clone() }).unwrap();
                let expected = match items {
                    "text" => taken.clone(),
                    _ => format!("{places:?}"),
                };
                assert_eq!(found, expected, "{source} of {value}");
            }
        }
    }
    for source in ["''[::-1]", "[][::-1]|length", "'abc'[0:2:-9223372036854775808]"] {
        let source = format!("{{{{ {source} }}}}");
        let program = Program::compile(&source, &Form::Template(SyntaxConfig::default())).unwrap();
        let environment: &'static Environment<'static> = Box::leak(Box::new(environment()));
        let found = program.render(environment, || context! {}).unwrap();
        assert!(found.is_empty() || found == "0", "{source}: {found}");
    }
}

#[test]
fn mistakes_are_told_with_their_line() {
    let environment: &'static Environment<'static> = Box::leak(Box::new(environment()));
    let source = "a\n{% for x in words %}\n{{ x + 1 }}\n{% endfor %}";
    let program = Program::compile(source, &Form::Template(SyntaxConfig::default())).unwrap();
    assert_eq!(program.render(environment, values).unwrap_err().line(), Some(3));
}
