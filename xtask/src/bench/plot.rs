//! `bench --plot`: the figures as SVG files.

use std::fmt::Write;
use std::io;
use std::path::Path;

/// The charts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chart {
    /// Instructions against live objects.
    Live,
    /// Instructions against the size in MiB.
    Size,
    /// Instructions of the median (0) and the worst (1) single operation.
    Worst,
    /// Bytes of a live object: dense (0) and one per GiB (1).
    Bytes,
    /// Instructions of the library (0) and of the C library (1).
    Parts,
}

/// One figure in a chart.
#[derive(Debug, Clone)]
pub struct Point {
    /// The chart.
    pub chart: Chart,
    /// The line or the group of bars.
    pub series: String,
    /// The place on the axis, or the number of the bar.
    pub x: f64,
    /// The figure.
    pub y: f64,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 230.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 100.0;
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999"];

/// Draws each chart that has points into a file of its own.
pub fn draw(directory: &Path, points: &[Point]) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    for (chart, name, title, axis) in [
        (Chart::Live, "live", "Instructions against live objects", "live objects"),
        (Chart::Size, "size", "Instructions against size", "size in MiB"),
        (Chart::Worst, "worst", "Instructions of a single operation on the way to a million objects", ""),
        (Chart::Bytes, "bytes", "Bytes of a live object", ""),
        (Chart::Parts, "parts", "Instructions of an operation, by where they are", ""),
    ] {
        let points: Vec<&Point> = points.iter().filter(|point| point.chart == chart).collect();
        if points.is_empty() {
            continue;
        }
        let text = match chart {
            Chart::Live | Chart::Size => lines(title, axis, &points),
            Chart::Worst | Chart::Bytes | Chart::Parts => bars(title, axis, &points, chart),
        };
        std::fs::write(directory.join(format!("{name}.svg")), text)?;
    }
    Ok(())
}

/// The names of the lines or groups, in the order in which they came.
fn series<'a>(points: &[&'a Point]) -> Vec<&'a str> {
    let mut names: Vec<&str> = Vec::new();
    for point in points {
        if !names.contains(&point.series.as_str()) {
            names.push(&point.series);
        }
    }
    names
}

/// A round number above all figures, and the distance of the lines of the grid.
fn scale(points: &[&Point], stacked: bool) -> (f64, f64) {
    let most = points.iter().map(|point| if stacked { sum(points, &point.series) } else { point.y });
    let most = most.fold(1.0, f64::max);
    let power = 10_f64.powf(most.log10().floor());
    let step = [0.1, 0.2, 0.5, 1.0, 2.0].map(|part| part * power).into_iter().find(|step| most / step <= 8.0);
    let step = step.unwrap_or(power);
    ((most / step).ceil() * step, step)
}

fn sum(points: &[&Point], series: &str) -> f64 {
    points.iter().filter(|point| point.series == series).map(|point| point.y).sum()
}

fn vertical(y: f64, most: f64) -> f64 {
    HEIGHT - BOTTOM - y / most * (HEIGHT - TOP - BOTTOM)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, size: u32, content: &str) {
    let content = escape(content);
    let _ = writeln!(out, "<text x='{x:.1}' y='{y:.1}' text-anchor='{anchor}' font-size='{size}'>{content}</text>");
}

/// Frame, title and horizontal grid.
fn frame(title: &str, axis: &str, (most, step): (f64, f64)) -> String {
    let mut out = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' font-family='sans-serif'>\n\
         <rect width='100%' height='100%' fill='white'/>\n"
    );
    text(&mut out, LEFT, 28.0, "start", 16, title);
    text(&mut out, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - BOTTOM + 44.0, "middle", 12, axis);
    let mut y = 0.0;
    while y <= most + step / 2.0 {
        let at = vertical(y, most);
        let _ = writeln!(out, "<line x1='{LEFT}' x2='{:.1}' y1='{at:.1}' y2='{at:.1}' stroke='#ddd'/>", WIDTH - RIGHT);
        text(&mut out, LEFT - 8.0, at + 4.0, "end", 11, &format!("{y}"));
        y += step;
    }
    out
}

/// Lines over a logarithmic axis.
fn lines(title: &str, axis: &str, points: &[&Point]) -> String {
    // A line has at least two points.
    let is_line = |point: &&&Point| points.iter().filter(|other| other.series == point.series).count() > 1;
    let points: &[&Point] = &points.iter().filter(is_line).copied().collect::<Vec<_>>();
    let scale = scale(points, false);
    let mut out = frame(title, axis, scale);
    let logs = || points.iter().map(|point| point.x.log10());
    let (low, high) = (logs().fold(f64::MAX, f64::min), logs().fold(f64::MIN, f64::max).max(1.0));
    let across = |x: f64| LEFT + 20.0 + (x.log10() - low) / (high - low) * (WIDTH - LEFT - RIGHT - 40.0);
    let mut places: Vec<f64> = points.iter().map(|point| point.x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let mut free = 0.0;
    for x in places {
        // Leaves out a label that would cover the one before.
        if across(x) < free {
            continue;
        }
        free = across(x) + 45.0;
        text(&mut out, across(x), HEIGHT - BOTTOM + 18.0, "middle", 11, &format!("{x}"));
    }
    for (number, name) in series(points).into_iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let own: Vec<&&Point> = points.iter().filter(|point| point.series == name).collect();
        let path: Vec<String> =
            own.iter().map(|point| format!("{:.1},{:.1}", across(point.x), vertical(point.y, scale.0))).collect();
        let _ = writeln!(out, "<polyline points='{}' fill='none' stroke='{colour}' stroke-width='2'/>", path.join(" "));
        for point in &own {
            let (x, y) = (across(point.x), vertical(point.y, scale.0));
            let _ = writeln!(out, "<circle cx='{x:.1}' cy='{y:.1}' r='3.5' fill='{colour}'/>");
        }
        legend(&mut out, number, colour, name);
    }
    out + "</svg>\n"
}

fn legend(out: &mut String, number: usize, colour: &str, name: &str) {
    let y = TOP + 10.0 + number as f64 * 20.0;
    let x = WIDTH - RIGHT + 14.0;
    let _ = writeln!(out, "<rect x='{x:.1}' y='{:.1}' width='12' height='12' fill='{colour}'/>", y - 10.0);
    text(out, x + 18.0, y, "start", 12, name);
}

/// Two bars for each group: beside each other, or one on the other for parts of a whole.
fn bars(title: &str, axis: &str, points: &[&Point], chart: Chart) -> String {
    let stacked = chart == Chart::Parts;
    let scale = scale(points, stacked);
    let mut out = frame(title, axis, scale);
    let names = series(points);
    let group = (WIDTH - LEFT - RIGHT) / names.len() as f64;
    for (number, name) in names.iter().enumerate() {
        let start = LEFT + number as f64 * group + group * 0.15;
        let mut below = 0.0;
        for point in points.iter().filter(|point| point.series == *name) {
            let width = group * if stacked { 0.7 } else { 0.35 };
            let x = start + if stacked { 0.0 } else { point.x * width };
            let (top, bottom) = (vertical(below + point.y, scale.0), vertical(below, scale.0));
            let colour = COLOURS[point.x as usize % COLOURS.len()];
            let height = bottom - top;
            let _ = writeln!(
                out,
                "<rect x='{x:.1}' y='{top:.1}' width='{width:.1}' height='{height:.1}' fill='{colour}'/>"
            );
            if stacked {
                below += point.y;
            } else {
                text(&mut out, x + width / 2.0, top - 4.0, "middle", 10, &format!("{:.0}", point.y));
            }
        }
        let (x, y) = (start + group * 0.35, HEIGHT - BOTTOM + 14.0);
        let short = escape(name);
        let _ = writeln!(
            out,
            "<text x='{x:.1}' y='{y:.1}' text-anchor='end' font-size='10' \
             transform='rotate(-25 {x:.1} {y:.1})'>{short}</text>"
        );
    }
    let parts = match chart {
        Chart::Worst => ["median", "worst"],
        Chart::Bytes => ["dense", "one per GiB"],
        _ => ["this library", "C library"],
    };
    for (number, part) in parts.into_iter().enumerate() {
        legend(&mut out, number, COLOURS[number], part);
    }
    out + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_chart_with_points_is_a_file() {
        let point = |chart, x, y| Point { chart, series: "a <b>".into(), x, y };
        let directory = std::env::temp_dir().join(format!("bench-plot-{}", std::process::id()));
        let points = [
            point(Chart::Live, 1.0, 400.0),
            point(Chart::Live, 1000.0, 410.0),
            point(Chart::Parts, 0.0, 300.0),
            point(Chart::Parts, 1.0, 120.0),
        ];
        draw(&directory, &points).unwrap();
        let live = std::fs::read_to_string(directory.join("live.svg")).unwrap();
        assert!(live.starts_with("<svg") && live.ends_with("</svg>\n") && live.contains("a &lt;b&gt;"), "{live}");
        assert!(directory.join("parts.svg").exists());
        assert!(!directory.join("size.svg").exists(), "it has no points");
        std::fs::remove_dir_all(directory).unwrap();
    }
}
