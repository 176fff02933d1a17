//! Functions that a model may call, as requests of OpenAI's and Anthropic's interfaces name them.

use engine::{CallChoice, Tool, ToolOptions};
use serde_json::{Map, Value, json};

use crate::ApiError;

/// Tools of a request at most.
pub const MAX_TOOLS: usize = 128;
/// Characters of a tool's name.
const MAX_NAME: usize = 64;

/// How a request names its tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`.
    Chat,
    /// `{"type": "function", "name", "description", "parameters", "strict"}`.
    Responses,
    /// `{"name", "description", "input_schema"}`.
    Messages,
}

/// The tools of a request, and whether they are called.
pub fn options(
    form: Form,
    tools: Option<&[Value]>,
    choice: Option<&Value>,
    parallel: Option<bool>,
) -> Result<ToolOptions, ApiError> {
    let given = tools.unwrap_or_default();
    if given.len() > MAX_TOOLS {
        return Err(ApiError::value("tools", format!("has {} entries; {MAX_TOOLS} at most", given.len())));
    }
    let tools = given.iter().enumerate().map(|(i, tool)| parse(form, i, tool)).collect::<Result<Vec<_>, _>>()?;
    for (i, tool) in tools.iter().enumerate() {
        if tools[..i].iter().any(|other| other.name == tool.name) {
            return Err(ApiError::value(format!("tools[{i}]"), format!("is the second one that is called {:?}", tool.name)));
        }
    }
    let mut options = ToolOptions { tools, parallel: parallel.unwrap_or(true), ..ToolOptions::default() };
    if let Some(choice) = choice {
        choose(form, choice, &mut options)?;
    }
    for name in options.only.iter().flatten() {
        if options.tools.iter().all(|tool| tool.name != *name) {
            let shown: String = name.chars().take(MAX_NAME).collect();
            return Err(ApiError::value("tool_choice", format!("names {shown:?}, which is none of the `tools`")));
        }
    }
    if options.choice == CallChoice::Required && options.callable().next().is_none() {
        return Err(ApiError::value("tool_choice", "asks for a call, and there are no `tools`: give some, or leave it out"));
    }
    Ok(options)
}

fn parse(form: Form, index: usize, tool: &Value) -> Result<Tool, ApiError> {
    let place = format!("tools[{index}]");
    let Value::Object(outer) = tool else { return Err(ApiError::value(place, "must be an object")) };
    let kind = outer.get("type").and_then(Value::as_str);
    let is_function = match form {
        Form::Messages => matches!(kind, None | Some("custom")),
        Form::Chat | Form::Responses => kind == Some("function"),
    };
    if !is_function {
        let advice = "functions of the client's own are: {\"type\": \"function\", ...}";
        return Err(ApiError::unsupported(format!("{place}.type"), advice));
    }
    let (function, place) = match form {
        Form::Chat => match outer.get("function") {
            Some(Value::Object(function)) => (function, format!("{place}.function")),
            _ => return Err(ApiError::missing(&format!("{place}.function"), "give an object with a name")),
        },
        Form::Responses | Form::Messages => (outer, place),
    };
    let name = match function.get("name") {
        Some(Value::String(name)) => name.clone(),
        _ => return Err(ApiError::missing(&format!("{place}.name"), "give the function's name")),
    };
    let is_known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_known) {
        let message = format!("must be 1 to {MAX_NAME} letters, digits, `_`, `-` and `.`");
        return Err(ApiError::value(format!("{place}.name"), message));
    }
    let description = match function.get("description") {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(_) => return Err(ApiError::value(format!("{place}.description"), "must be a string")),
    };
    let key = if form == Form::Messages { "input_schema" } else { "parameters" };
    let parameters = match function.get(key) {
        None | Some(Value::Null) => json!({ "type": "object", "properties": {} }),
        Some(Value::Object(schema)) => Value::Object(with_type(schema.clone(), &format!("{place}.{key}"))?),
        Some(_) => return Err(ApiError::value(format!("{place}.{key}"), "must be a JSON Schema, an object")),
    };
    let strict = match function.get("strict") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(strict)) => *strict,
        Some(_) => return Err(ApiError::value(format!("{place}.strict"), "must be true or false")),
    };
    Ok(Tool { name, description, parameters, strict })
}

/// Arguments are an object, whether the schema says so or not.
fn with_type(mut schema: Map<String, Value>, place: &str) -> Result<Map<String, Value>, ApiError> {
    match schema.get("type") {
        Some(kind) if kind == "object" => {}
        Some(_) => return Err(ApiError::value(format!("{place}.type"), "must be \"object\": arguments have names")),
        None => {
            schema.insert("type".into(), "object".into());
        }
    }
    Ok(schema)
}

fn choose(form: Form, choice: &Value, options: &mut ToolOptions) -> Result<(), ApiError> {
    let unknown = || {
        let forms = match form {
            Form::Messages => {
                "{\"type\": \"auto\"}, {\"type\": \"any\"}, {\"type\": \"tool\", \"name\": ...} or {\"type\": \"none\"}"
            }
            _ => "\"none\", \"auto\", \"required\", {\"type\": \"function\", ...} or {\"type\": \"allowed_tools\", ...}",
        };
        ApiError::value("tool_choice", format!("must be {forms}"))
    };
    let named = |name: &Value| name.as_str().map(str::to_owned).ok_or_else(unknown);
    let kind = choice.as_str().or_else(|| choice["type"].as_str()).ok_or_else(unknown)?;
    if form == Form::Messages {
        if choice["disable_parallel_tool_use"] == true {
            options.parallel = false;
        }
        if choice.is_string() {
            return Err(unknown());
        }
    }
    match (form, kind) {
        (_, "auto") => options.choice = CallChoice::Auto,
        (_, "none") => options.choice = CallChoice::None,
        (Form::Chat | Form::Responses, "required") | (Form::Messages, "any") => options.choice = CallChoice::Required,
        (Form::Messages, "tool") | (Form::Responses, "function") => {
            (options.choice, options.only) = (CallChoice::Required, Some(vec![named(&choice["name"])?]));
        }
        (Form::Chat, "function") => {
            (options.choice, options.only) = (CallChoice::Required, Some(vec![named(&choice["function"]["name"])?]));
        }
        (Form::Chat | Form::Responses, "allowed_tools") => {
            let allowed = if form == Form::Chat { &choice["allowed_tools"] } else { choice };
            options.choice = match allowed["mode"].as_str() {
                Some("auto") => CallChoice::Auto,
                Some("required") => CallChoice::Required,
                _ => return Err(ApiError::value("tool_choice.mode", "must be \"auto\" or \"required\"")),
            };
            let name = |tool: &Value| named(if form == Form::Chat { &tool["function"]["name"] } else { &tool["name"] });
            let tools = allowed["tools"].as_array().ok_or_else(unknown)?;
            options.only = Some(tools.iter().map(name).collect::<Result<_, _>>()?);
        }
        _ => return Err(unknown()),
    }
    Ok(())
}

/// Calls of an earlier answer, as templates know them: each with an id, a name and the text of its arguments.
pub fn earlier_calls(place: &str, calls: &Value) -> Result<Value, ApiError> {
    let Value::Array(calls) = calls else { return Err(ApiError::value(place, "must be a list of calls")) };
    let call = |(i, call): (usize, &Value)| {
        let place = format!("{place}[{i}]");
        let function = &call["function"];
        let name = match &function["name"] {
            Value::String(name) if !name.is_empty() => name,
            _ => return Err(ApiError::missing(&format!("{place}.function.name"), "give the function's name")),
        };
        let arguments = match &function["arguments"] {
            Value::Null => json!("{}"),
            Value::String(text) => json!(text),
            object @ Value::Object(_) => json!(object.to_string()),
            _ => return Err(ApiError::value(format!("{place}.function.arguments"), "must be the text of a JSON object")),
        };
        let mut call = json!({ "type": "function", "function": { "name": name, "arguments": arguments } });
        if let (Some(id), Some(map)) = (calls[i]["id"].as_str(), call.as_object_mut()) {
            map.insert("id".into(), id.into());
        }
        Ok(call)
    };
    calls.iter().enumerate().map(call).collect()
}

/// The message of an assistant that made a call.
pub fn call_message(id: &Value, name: &Value, arguments: &Value) -> Value {
    json!({
        "role": "assistant",
        "content": "",
        "tool_calls": [{ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } }],
    })
}

/// The message that tells what a call gave.
pub fn result_message(id: &Value, content: &Value) -> Value {
    json!({ "role": "tool", "tool_call_id": id, "content": content })
}

/// Appends a message; calls that follow each other, or an assistant's text, are one message.
pub fn push_message(chat: &mut Vec<Value>, mut message: Value) {
    if let (Some(last), Some(calls)) = (chat.last_mut(), message.get_mut("tool_calls").and_then(Value::as_array_mut))
        && last["role"] == "assistant"
        && let Value::Object(last) = last
    {
        let all = last.entry("tool_calls").or_insert_with(|| Value::Array(Vec::new()));
        if let Value::Array(all) = all {
            all.append(calls);
            return;
        }
    }
    chat.push(message);
}
