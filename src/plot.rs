//! Line charts as SVG that is alone: one file, no script, readable on light and on dark.
//!
//! It leaves to others: what is drawn.

use std::fmt::Write as _;

/// One pair of axes.
pub(crate) struct Panel {
    /// What stands along the vertical axis.
    pub title: String,
    /// What stands along the horizontal axis.
    pub x: String,
    /// The lines.
    pub series: Vec<Series>,
}

/// One line.
pub(crate) struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
}

/// Sizes in pixels.
const WIDTH: f64 = 960.0;
const PLOT_HEIGHT: f64 = 360.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 40.0;
const BELOW_AXIS: f64 = 48.0;
const LEGEND_LINE: f64 = 20.0;

/// Points of a line that are drawn: two for each pixel across, so that no peak is lost.
const MOST_POINTS: usize = 2 * WIDTH as usize;

/// Colours that people with any kind of sight tell apart, on white and on dark grey (Okabe and Ito, but for black and
/// yellow).
const COLOURS: [&str; 6] = ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9"];

/// Further lines take the colours again, dashed.
const DASHES: [&str; 4] = ["", "6 3", "2 3", "8 3 2 3"];

const STYLE: &str = "\
    svg { background: #ffffff; color: #1f2328; font: 13px system-ui, sans-serif; }\n\
    .grid { stroke: currentColor; stroke-opacity: 0.15; } .axis { stroke: currentColor; }\n\
    text { fill: currentColor; } .line { fill: none; stroke-width: 1.6; stroke-linejoin: round; }\n\
    @media (prefers-color-scheme: dark) { svg { background: #16181d; color: #e6e8eb; } }\n";

/// Draws the panels below each other.
pub(crate) fn svg(panels: &[Panel]) -> String {
    let heights: Vec<f64> = panels.iter().map(height).collect();
    let height: f64 = heights.iter().sum();
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n\
         <style>\n{STYLE}</style>\n"
    );
    let mut top = 0.0;
    for (panel, height) in panels.iter().zip(heights) {
        let _ = write!(text, "<g transform=\"translate(0 {top})\">\n{}</g>\n", drawn(panel));
        top += height;
    }
    text + "</svg>\n"
}

/// A page with a drawing and what belongs below it.
pub(crate) fn html(title: &str, svg: &str, below: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{title}</title>\n<style>\n\
         body {{ font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 960px; color-scheme: light dark; }}\n\
         svg {{ max-width: 100%; height: auto; }} div {{ overflow-x: auto; }}\n\
         table {{ border-collapse: collapse; margin-top: 1.5em; }} th, td {{ padding: 0.3em 0.8em; text-align: right; }}\n\
         tr {{ border-bottom: 1px solid #8884; }} th:first-child {{ text-align: left; }}\n\
         </style>\n{svg}<div>\n{below}</div>\n</html>\n",
        title = escaped(title),
    )
}

/// Text between tags or in quotes.
pub(crate) fn escaped(text: &str) -> String {
    let visible = text.replace(engine::visible::is_hidden, "\u{fffd}");
    visible.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn height(panel: &Panel) -> f64 {
    TOP + PLOT_HEIGHT + BELOW_AXIS + LEGEND_LINE * panel.series.len() as f64 + 16.0
}

fn drawn(panel: &Panel) -> String {
    let points =
        || panel.series.iter().flat_map(|series| &series.points).filter(|(x, y)| x.is_finite() && y.is_finite());
    let x = Axis::over(points().map(|(x, _)| *x), LEFT, WIDTH - RIGHT);
    let y = Axis::over(points().map(|(_, y)| *y), TOP + PLOT_HEIGHT, TOP);
    let (bottom, right) = (TOP + PLOT_HEIGHT, WIDTH - RIGHT);
    let mut text = format!("<text x=\"{LEFT}\" y=\"24\" font-weight=\"600\">{}</text>\n", escaped(&panel.title));
    for tick in y.ticks(6) {
        let at = y.place(tick);
        let _ = write!(
            text,
            "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\n\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
            LEFT - 8.0,
            at + 4.0,
            label(tick)
        );
    }
    for tick in x.ticks(8) {
        let at = x.place(tick);
        let _ = write!(
            text,
            "<line class=\"axis\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom}\" y2=\"{}\"/>\n\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n",
            bottom + 5.0,
            bottom + 20.0,
            label(tick)
        );
    }
    let _ = write!(
        text,
        "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{right}\" y1=\"{bottom}\" y2=\"{bottom}\"/>\n\
         <text x=\"{right}\" y=\"{}\" text-anchor=\"end\">{}</text>\n",
        bottom + 38.0,
        escaped(&panel.x)
    );
    for (number, series) in panel.series.iter().enumerate() {
        text += &line(series, number, &x, &y);
    }
    text
}

/// A line and its entry in the legend.
fn line(series: &Series, number: usize, x: &Axis, y: &Axis) -> String {
    let colour = COLOURS[number % COLOURS.len()];
    let dash = DASHES[number / COLOURS.len() % DASHES.len()];
    let stroke = format!("stroke=\"{colour}\" stroke-dasharray=\"{dash}\"");
    let points = thinned(&series.points);
    let places: Vec<String> =
        points.iter().map(|(at, value)| format!("{:.1},{:.1}", x.place(*at), y.place(*value))).collect();
    let name = escaped(&series.name);
    let last = series.points.last().map(|(_, value)| label(*value)).unwrap_or_default();
    let legend = TOP + PLOT_HEIGHT + BELOW_AXIS + LEGEND_LINE * (number as f64 + 0.5);
    // A line of one point has no length to be seen.
    let dot = match points.as_slice() {
        [(at, value)] => {
            format!("<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\"/>\n", x.place(*at), y.place(*value))
        }
        _ => String::new(),
    };
    format!(
        "<polyline class=\"line\" {stroke} points=\"{}\"><title>{name}</title></polyline>\n{dot}\
         <line class=\"line\" {stroke} x1=\"{LEFT}\" x2=\"{}\" y1=\"{legend}\" y2=\"{legend}\"/>\n\
         <text x=\"{}\" y=\"{}\">{name} (last {last})</text>\n",
        places.join(" "),
        LEFT + 28.0,
        LEFT + 36.0,
        legend + 4.0,
    )
}

/// At most [`MOST_POINTS`] of the points: of each stretch the lowest and the highest, in their order.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let finite: Vec<(f64, f64)> = points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
    if finite.len() <= MOST_POINTS {
        return finite;
    }
    let stretch = finite.len().div_ceil(MOST_POINTS / 2);
    let ends = finite.chunks(stretch).flat_map(|chunk| {
        let by_value = |one: &&(f64, f64), other: &&(f64, f64)| one.1.total_cmp(&other.1);
        let lowest = chunk.iter().min_by(by_value).copied();
        let highest = chunk.iter().max_by(by_value).copied();
        let mut ends: Vec<(f64, f64)> = lowest.into_iter().chain(highest).collect();
        ends.sort_by(|one, other| one.0.total_cmp(&other.0));
        ends
    });
    ends.collect()
}

/// Values along a line of pixels.
struct Axis {
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, from: f64, to: f64) -> Self {
        let (low, high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = match () {
            () if low > high => (0.0, 1.0),
            () if low == high => (low - 0.5, high + 0.5),
            () => (low, high),
        };
        Self { low, high, from, to }
    }

    fn place(&self, value: f64) -> f64 {
        self.from + (value - self.low) / (self.high - self.low) * (self.to - self.from)
    }

    /// Round values on it, about so many.
    fn ticks(&self, wanted: u32) -> Vec<f64> {
        let rough = (self.high - self.low) / f64::from(wanted);
        let magnitude = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * magnitude).into_iter().find(|step| *step >= rough);
        let step = step.unwrap_or(rough);
        let first = (self.low / step).ceil() as i64;
        let last = (self.high / step).floor() as i64;
        (first..=last).map(|count| count as f64 * step).collect()
    }
}

fn label(value: f64) -> String {
    crate::words::float((value * 1e9).round() / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_axis() {
        let ticks = |low: f64, high: f64| Axis { low, high, from: 0.0, to: 1.0 }.ticks(6);
        assert_eq!(ticks(1.0, 120.0), [20.0, 40.0, 60.0, 80.0, 100.0, 120.0]);
        assert_eq!(ticks(-1.0, 1.0), [-1.0, -0.5, 0.0, 0.5, 1.0]);
        assert!(ticks(5.6611, 5.9402).iter().all(|tick| (5.6611..=5.9402).contains(tick)));
    }

    #[test]
    fn thinning_keeps_the_peaks_and_the_order() {
        let mut points: Vec<(f64, f64)> = (0..1_000_000).map(|step| (f64::from(step), f64::from(step % 7))).collect();
        points[777_777].1 = 1e6;
        points[5].1 = f64::NAN;
        let thin = thinned(&points);
        assert!(thin.len() <= MOST_POINTS, "{}", thin.len());
        assert!(thin.contains(&(777_777.0, 1e6)));
        assert!(thin.is_sorted_by(|one, other| one.0 <= other.0));
    }

    #[test]
    fn names_cannot_break_out_of_the_drawing() {
        let series = |name: &str, points: &[(f64, f64)]| Series { name: name.to_owned(), points: points.to_vec() };
        let panel = Panel {
            title: "loss".to_owned(),
            x: "step".to_owned(),
            series: vec![
                series("<script>\"&\u{1}", &[(1.0, 2.0), (2.0, 1.0)]),
                series("one", &[(1.0, 1.5)]),
                series("none", &[]),
            ],
        };
        let text = svg(&[panel]);
        assert!(text.contains("&lt;script&gt;&quot;&amp;\u{fffd}") && !text.contains("<script>"), "{text}");
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        assert_eq!(text.matches("<circle").count(), 1);
    }
}
