//! Elle's history format: EDN maps with `:type`, `:process`, `:index`, `:time` and `:value`.
//!
//! ```text
//! {:index 0, :type :invoke, :process 0, :f :txn, :value [[:append 1 5] [:r 2 nil]]}
//! {:index 1, :type :ok, :process 0, :f :txn, :value [[:append 1 5] [:r 2 [3 4]]]}
//! ```
//!
//! The maps stand one after another, or in one vector. Keys that are not listed here are ignored.
//! So are operations whose process is not an integer: those are of Jepsen's nemesis.

use std::fmt::Write as _;
use std::sync::Arc;

use crate::edn::{Datum, EdnError, Form, Reader};
use crate::history::{History, Kind, MicroOp, Operation, Seen};
use crate::value::Value;

/// Reads a history.
///
/// # Errors
///
/// [`EdnError`] with the place, if the text is not EDN or not a history.
pub fn read(text: &str) -> Result<History, EdnError> {
    let mut reader = Reader::new(text);
    let mut history = History::default();
    reader.skip(0)?;
    let from = reader.at();
    if let Some(close) = reader.open_sequence() {
        while !reader.close(close, 1)? {
            match reader.form(1)? {
                Some(form) => add(&reader, &mut history, &form)?,
                None => return Err(reader.error(from, format!("missing \"{close}\""))),
            }
        }
        if let Some(form) = reader.form(0)? {
            return Err(reader.error(form.at, "text follows the history"));
        }
    } else {
        while let Some(form) = reader.form(0)? {
            add(&reader, &mut history, &form)?;
        }
    }
    Ok(history)
}

fn add(reader: &Reader<'_>, history: &mut History, form: &Form) -> Result<(), EdnError> {
    let Datum::Map(pairs) = &form.is else {
        return Err(reader.error(form.at, format!("expected a map, found {}", form.is)));
    };
    let get = |name: &str| {
        pairs.iter().find_map(|(key, value)| match &key.is {
            Datum::Keyword(key) if key == name => Some(value),
            _ => None,
        })
    };
    let Some(kind) = get("type") else {
        return Err(reader.error(form.at, "operation has no :type"));
    };
    let kind = match &kind.is {
        Datum::Keyword(name) if name == "invoke" => Kind::Invoke,
        Datum::Keyword(name) if name == "ok" => Kind::Ok,
        Datum::Keyword(name) if name == "fail" => Kind::Fail,
        Datum::Keyword(name) if name == "info" => Kind::Info,
        _ => {
            let problem = "expected :invoke, :ok, :fail or :info";
            return Err(reader.error(kind.at, problem));
        }
    };
    let process = match get("process").map(|form| &form.is) {
        None | Some(Datum::Nil) => None,
        Some(Datum::Integer(process)) => Some(*process),
        Some(_) => return Ok(()),
    };
    let index = match get("index") {
        None => history.operations.len() as u64,
        Some(form) => match &form.is {
            Datum::Integer(index) => {
                u64::try_from(*index).map_err(|_| reader.error(form.at, ":index is negative"))?
            }
            Datum::Nil => history.operations.len() as u64,
            other => {
                return Err(reader.error(form.at, format!("expected an integer, found {other}")));
            }
        },
    };
    let time = match get("time").map(|form| &form.is) {
        Some(Datum::Integer(time)) => Some(*time),
        _ => None,
    };
    let value = match get("value") {
        None => None,
        Some(form) => match &form.is {
            Datum::Nil => None,
            Datum::Sequence(steps) => Some(
                steps
                    .iter()
                    .map(|step| micro_op(reader, step))
                    .collect::<Result<_, _>>()?,
            ),
            other => {
                return Err(reader.error(form.at, format!("expected steps, found {other}")));
            }
        },
    };
    history.operations.push(Operation {
        kind,
        process,
        index,
        time,
        value,
    });
    Ok(())
}

fn micro_op(reader: &Reader<'_>, form: &Form) -> Result<MicroOp, EdnError> {
    let problem = "expected [:append key value], [:w key value] or [:r key value]";
    let Datum::Sequence(parts) = &form.is else {
        return Err(reader.error(form.at, problem));
    };
    let [function, key, value] = parts.as_slice() else {
        return Err(reader.error(form.at, problem));
    };
    let key = atom(reader, key)?;
    match &function.is {
        Datum::Keyword(name) if name == "append" => Ok(MicroOp::Append {
            key,
            value: atom(reader, value)?,
        }),
        Datum::Keyword(name) if name == "w" => Ok(MicroOp::Write {
            key,
            value: atom(reader, value)?,
        }),
        Datum::Keyword(name) if name == "r" => {
            let seen = match &value.is {
                Datum::Nil => Seen::Nil,
                Datum::Sequence(elements) => Seen::List(
                    elements
                        .iter()
                        .map(|element| atom(reader, element))
                        .collect::<Result<_, _>>()?,
                ),
                _ => Seen::Value(atom(reader, value)?),
            };
            Ok(MicroOp::Read { key, seen })
        }
        _ => Err(reader.error(function.at, problem)),
    }
}

fn atom(reader: &Reader<'_>, form: &Form) -> Result<Value, EdnError> {
    Ok(match &form.is {
        Datum::Nil => Value::Nil,
        Datum::Bool(value) => Value::Bool(*value),
        Datum::Integer(value) => Value::Integer(*value),
        Datum::Keyword(name) => Value::Keyword(Arc::new(name.clone())),
        Datum::Text(text) => Value::Text(Arc::new(text.clone())),
        other => {
            let problem = format!("expected a key or a value, found {other}");
            return Err(reader.error(form.at, problem));
        }
    })
}

/// Returns the text of a history, a line for each operation. [`read`] gives the same history.
#[must_use]
pub fn write(history: &History) -> String {
    let mut text = String::new();
    for operation in &history.operations {
        let kind = match operation.kind {
            Kind::Invoke => "invoke",
            Kind::Ok => "ok",
            Kind::Fail => "fail",
            Kind::Info => "info",
        };
        // Writing to a string does not fail.
        let _ = write!(text, "{{:index {}", operation.index);
        if let Some(time) = operation.time {
            let _ = write!(text, ", :time {time}");
        }
        let _ = write!(text, ", :type :{kind}");
        if let Some(process) = operation.process {
            let _ = write!(text, ", :process {process}");
        }
        text.push_str(", :f :txn, :value ");
        match &operation.value {
            None => text.push_str("nil"),
            Some(steps) => write_steps(&mut text, steps, usize::MAX),
        }
        text.push_str("}\n");
    }
    text
}

/// Writes the steps of a transaction. Of lists longer than `most`, only the end is written.
pub(crate) fn write_steps(text: &mut String, steps: &[MicroOp], most: usize) {
    text.push('[');
    for (number, step) in steps.iter().enumerate() {
        if number > 0 {
            text.push(' ');
        }
        let _ = match step {
            MicroOp::Append { key, value } => write!(text, "[:append {key} {value}]"),
            MicroOp::Write { key, value } => write!(text, "[:w {key} {value}]"),
            MicroOp::Read { key, seen } => {
                let _ = write!(text, "[:r {key} ");
                match seen {
                    Seen::Nil => text.push_str("nil"),
                    Seen::Value(value) => {
                        let _ = write!(text, "{value}");
                    }
                    Seen::List(elements) => write_list(text, elements, most),
                }
                text.push(']');
                Ok(())
            }
        };
    }
    text.push(']');
}

/// Writes a list. If it is longer than `most`, only its end is written, after `...`.
pub(crate) fn write_list(text: &mut String, elements: &[Value], most: usize) {
    text.push('[');
    let from = elements.len().saturating_sub(most);
    if from > 0 {
        text.push_str("... ");
    }
    for (number, element) in elements.iter().skip(from).enumerate() {
        let _ = write!(text, "{}{element}", if number > 0 { " " } else { "" });
    }
    text.push(']');
}
