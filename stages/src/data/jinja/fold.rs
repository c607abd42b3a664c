//! Constants that minijinja works out while it compiles, before anything is charged: `'a' * 100000000` is one.

use minijinja::machinery::ast::{BinOpKind, CallArg, Expr, Stmt};
use minijinja::{Error, ErrorKind};

/// The bytes of all constants of a template that are worked out: they are worked out again at each level that they
/// stand in.
const MOST_FOLDED: f64 = 1_048_576.0;

/// What an expression of constants comes to, at most.
#[derive(Debug, Clone, Copy)]
enum Folded {
    /// A number no further from 0.
    Number(f64),
    /// A text or list of so many bytes.
    Bytes(f64),
}

impl Folded {
    fn bytes(self) -> f64 {
        match self {
            Self::Number(_) => 48.0,
            Self::Bytes(bytes) => bytes,
        }
    }

    fn magnitude(self) -> f64 {
        match self {
            Self::Number(magnitude) => magnitude,
            Self::Bytes(_) => 0.0,
        }
    }
}

/// Refuses a template whose constants are large.
pub(super) fn check_template(template: &Stmt<'_>) -> Result<(), Error> {
    Folding::default().statement(template)
}

/// Refuses an expression whose constants are large.
pub(super) fn check_expression(expression: &Expr<'_>) -> Result<(), Error> {
    Folding::default().expression(expression).map(|_| ())
}

#[derive(Default)]
struct Folding {
    folded: f64,
}

impl Folding {
    fn statements(&mut self, statements: &[Stmt<'_>]) -> Result<(), Error> {
        statements.iter().try_for_each(|statement| self.statement(statement))
    }

    fn expressions<'e, 's: 'e>(&mut self, all: impl IntoIterator<Item = &'e Expr<'s>>) -> Result<(), Error> {
        all.into_iter().try_for_each(|expression| self.expression(expression).map(|_| ()))
    }

    fn statement(&mut self, statement: &Stmt<'_>) -> Result<(), Error> {
        match statement {
            Stmt::Template(template) => self.statements(&template.children),
            Stmt::EmitExpr(emit) => self.expressions([&emit.expr]),
            Stmt::ForLoop(each) => {
                self.expressions([&each.target, &each.iter].into_iter().chain(&each.filter_expr))?;
                self.statements(&each.body)?;
                self.statements(&each.else_body)
            }
            Stmt::IfCond(condition) => {
                self.expressions([&condition.expr])?;
                self.statements(&condition.true_body)?;
                self.statements(&condition.false_body)
            }
            Stmt::WithBlock(with) => {
                self.expressions(with.assignments.iter().flat_map(|(target, value)| [target, value]))?;
                self.statements(&with.body)
            }
            Stmt::Set(set) => self.expressions([&set.target, &set.expr]),
            Stmt::SetBlock(set) => {
                self.expressions([&set.target].into_iter().chain(&set.filter))?;
                self.statements(&set.body)
            }
            Stmt::AutoEscape(escape) => {
                self.expressions([&escape.enabled])?;
                self.statements(&escape.body)
            }
            Stmt::FilterBlock(block) => {
                self.expressions([&block.filter])?;
                self.statements(&block.body)
            }
            Stmt::Macro(own) => {
                self.expressions(own.args.iter().chain(&own.defaults))?;
                self.statements(&own.body)
            }
            Stmt::CallBlock(block) => {
                self.expressions([&block.call.expr])?;
                self.arguments(&block.call.args)?;
                self.expressions(block.macro_decl.args.iter().chain(&block.macro_decl.defaults))?;
                self.statements(&block.macro_decl.body)
            }
            Stmt::Do(call) => {
                self.expressions([&call.call.expr])?;
                self.arguments(&call.call.args)
            }
            Stmt::Block(block) => self.statements(&block.body),
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => Ok(()),
            Stmt::Import(import) => self.expressions([&import.expr]),
            Stmt::FromImport(import) => self.expressions([&import.expr]),
            Stmt::Extends(extends) => self.expressions([&extends.name]),
            Stmt::Include(include) => self.expressions([&include.name]),
        }
    }

    fn arguments(&mut self, arguments: &[CallArg<'_>]) -> Result<(), Error> {
        self.expressions(arguments.iter().map(|argument| match argument {
            CallArg::Pos(value) | CallArg::Kwarg(_, value) | CallArg::PosSplat(value) | CallArg::KwargSplat(value) => {
                value
            }
        }))
    }

    /// What an expression is folded to, `None` where it is no constant.
    fn expression(&mut self, expression: &Expr<'_>) -> Result<Option<Folded>, Error> {
        let folded = match expression {
            Expr::Const(constant) => Some(match (constant.value.as_str(), f64::try_from(constant.value.clone())) {
                (Some(text), _) => Folded::Bytes(text.len() as f64),
                (None, Ok(number)) => Folded::Number(number.abs()),
                (None, Err(_)) => Folded::Number(1.0),
            }),
            Expr::List(list) => self.all(&list.items)?,
            Expr::Tuple(tuple) => self.all(&tuple.items)?,
            Expr::Map(map) => {
                let keys = self.all(&map.keys)?;
                let values = self.all(&map.values)?;
                keys.zip(values).map(|(keys, values)| Folded::Bytes(keys.bytes() + values.bytes()))
            }
            Expr::UnaryOp(unary) => self.expression(&unary.expr)?,
            Expr::BinOp(binary) => {
                let left = self.expression(&binary.left)?;
                let right = self.expression(&binary.right)?;
                match left.zip(right) {
                    Some((left, right)) => Some(self.fold(binary.op, left, right)?),
                    None => None,
                }
            }
            Expr::Compare(compare) => {
                self.expressions([&compare.expr].into_iter().chain(compare.ops.iter().map(|op| &op.expr)))?;
                Some(Folded::Number(1.0))
            }
            Expr::IfExpr(choice) => {
                self.expressions([&choice.test_expr, &choice.true_expr].into_iter().chain(&choice.false_expr))?;
                None
            }
            Expr::Slice(slice) => {
                let bounds = [&slice.start, &slice.stop, &slice.step].into_iter().flatten();
                self.expressions([&slice.expr].into_iter().chain(bounds))?;
                None
            }
            Expr::Filter(filter) => {
                self.expressions(&filter.expr)?;
                self.arguments(&filter.args)?;
                None
            }
            Expr::Test(test) => {
                self.expressions([&test.expr])?;
                self.arguments(&test.args)?;
                None
            }
            Expr::GetAttr(attribute) => {
                self.expressions([&attribute.expr])?;
                None
            }
            Expr::GetItem(item) => {
                self.expressions([&item.expr, &item.subscript_expr])?;
                None
            }
            Expr::Call(call) => {
                self.expressions([&call.expr])?;
                self.arguments(&call.args)?;
                None
            }
            Expr::Var(_) => None,
        };
        Ok(folded)
    }

    fn all(&mut self, items: &[Expr<'_>]) -> Result<Option<Folded>, Error> {
        let mut bytes = Some(32.0);
        for item in items {
            let item = self.expression(item)?;
            bytes = bytes.zip(item).map(|(bytes, item)| bytes + item.bytes() + 32.0);
        }
        Ok(bytes.map(Folded::Bytes))
    }

    fn fold(&mut self, operator: BinOpKind, left: Folded, right: Folded) -> Result<Folded, Error> {
        use Folded::{Bytes, Number};
        let folded = match (operator, left, right) {
            (BinOpKind::Mul, Bytes(bytes), times) | (BinOpKind::Mul, times, Bytes(bytes)) => {
                Bytes(bytes * times.magnitude().max(1.0))
            }
            (BinOpKind::Mul, Number(left), Number(right)) => Number(left * right),
            (BinOpKind::Pow, Number(left), Number(right)) => Number(left.max(1.0).powf(right)),
            (BinOpKind::Concat, left, right) => Bytes(left.bytes() + right.bytes()),
            (BinOpKind::Add, Number(left), Number(right)) | (BinOpKind::Sub, Number(left), Number(right)) => {
                Number(left + right)
            }
            (BinOpKind::Add, left, right) => Bytes(left.bytes() + right.bytes()),
            (BinOpKind::Div, Number(_), Number(_)) => Number(f64::INFINITY),
            (BinOpKind::ScAnd | BinOpKind::ScOr, Number(left), Number(right)) => Number(left.max(right)),
            (BinOpKind::ScAnd | BinOpKind::ScOr, left, right) => {
                // Either may be what it comes to, and be multiplied.
                if matches!((left, right), (Bytes(_), Bytes(_))) {
                    Bytes(left.bytes().max(right.bytes()))
                } else {
                    Bytes(left.bytes().max(right.bytes()) * left.magnitude().max(right.magnitude()).max(1.0))
                }
            }
            (_, left, right) => Number(left.magnitude().max(right.magnitude())),
        };
        if let Bytes(bytes) = folded {
            self.folded += bytes;
            if self.folded.is_nan() || self.folded > MOST_FOLDED {
                let problem = "its constants come to more than 1 MiB";
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        }
        Ok(folded)
    }
}
