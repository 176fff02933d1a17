//! Any body is honoured or refused by name: no parser panics, and no error is the server's.

#[path = "common/keys.rs"]
mod keys;

use keys::KEYS;
use openai::{
    ApiError, ModelContext,
    anthropic::MessagesRequest,
    chat::ChatRequest,
    completions::CompletionRequest,
    embeddings::EmbeddingsRequest,
    responses::ResponsesRequest,
    text::{DetokenizeRequest, TokenizeRequest},
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-3_i64..30).prop_map(Value::from),
        any::<f64>().prop_map(|x| json!(x)),
        (0.0..2.0_f64).prop_map(|x| json!(x)),
        "\\PC{0,12}".prop_map(Value::from),
        prop_oneof![Just("text"), Just("user"), Just("assistant"), Just("auto"), Just("none"), Just("enabled")]
            .prop_map(Value::from),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(
                (prop_oneof![Just("role"), Just("content"), Just("type"), Just("text"), Just("1")], inner),
                0..4
            )
            .prop_map(|pairs| Value::Object(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())),
        ]
    })
}

fn body() -> impl Strategy<Value = Value> {
    prop::collection::vec((0..KEYS.len(), value()), 0..8).prop_map(|pairs| {
        Value::Object(pairs.into_iter().map(|(key, value)| (KEYS[key].to_owned(), value)).collect::<Map<_, _>>())
    })
}

fn check<T>(result: Result<T, ApiError>) {
    if let Err(error) = result {
        assert_eq!(error.status, 400, "{error:?}");
        assert!(!error.message.is_empty() && error.message.len() < 2048, "{error:?}");
        assert!(error.body()["error"]["code"].is_string());
    }
}

fn parse_all(body: &[u8]) {
    let context = ModelContext::default();
    check(ChatRequest::parse(body).and_then(|request| request.into_generation(&context)));
    check(CompletionRequest::parse(body).and_then(CompletionRequest::into_generation));
    check(MessagesRequest::parse(body).and_then(|request| request.into_generation(&context)));
    check(ResponsesRequest::parse(body).and_then(|request| {
        let chat = request.input(&context)?;
        request.generation(chat)
    }));
    check(EmbeddingsRequest::parse(body));
    check(TokenizeRequest::parse(body));
    check(DetokenizeRequest::parse(body));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn any_object_is_honoured_or_refused(body in body()) {
        parse_all(body.to_string().as_bytes());
    }

    #[test]
    fn any_bytes_are_refused(body in prop::collection::vec(any::<u8>(), 0..64)) {
        parse_all(&body);
    }
}

#[test]
fn a_body_that_is_honoured_becomes_what_it_says() {
    let body = json!({
        "messages": [{ "role": "developer", "content": "Be short." }, { "role": "user", "content": [{ "type": "text", "text": "Hi" }] }],
        "max_completion_tokens": 7, "temperature": 0.5, "top_k": -1, "n": 3, "seed": -1, "stop": "x", "logprobs": true,
        "top_logprobs": 2, "logit_bias": { "5": -100 }, "stream": true, "stream_options": { "include_usage": true }, "user": "u",
    });
    let request = ChatRequest::parse(body.to_string().as_bytes()).unwrap();
    let generation = request.into_generation(&ModelContext::default()).unwrap();
    let [request] = generation.requests.as_slice() else { panic!("{} requests", generation.requests.len()) };
    let sampling = &request.sampling;
    assert_eq!((sampling.max_tokens, sampling.temperature, sampling.top_k), (Some(7), Some(0.5), Some(0)));
    assert_eq!((sampling.seed, sampling.logprobs, request.n_choices), (Some(u64::MAX), Some(2), 3));
    assert_eq!(
        (sampling.stop.as_slice(), sampling.logit_bias.as_slice()),
        (["x".to_owned()].as_slice(), [(5, -100.0)].as_slice())
    );
    assert!(generation.delivery.stream && generation.delivery.include_usage && request.stream);
    assert_eq!(generation.user.as_deref(), Some("u"));
    let engine::Prompt::Chat { messages, options } = &request.prompt else { panic!("no chat") };
    assert_eq!(
        messages.iter().map(|m| (m.role.as_str(), m.text())).collect::<Vec<_>>(),
        [("system", "Be short.".to_owned()), ("user", "Hi".to_owned())]
    );
    assert!(options.add_generation_prompt);
}
