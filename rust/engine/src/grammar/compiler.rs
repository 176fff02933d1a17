//! From a grammar to what checks tokens, within limits.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use llguidance::{
    Logger, Matcher, ParserFactory, TokenParser,
    api::{GrammarInit, GrammarWithLexer, ParserLimits, TopLevelGrammar},
    earley::SlicedBiasComputer,
    toktrie::InferenceCapabilities,
};
use serde_json::Value;

use super::{
    Constraint, Grammar, GrammarFault, MAX_GRAMMAR_BYTES, escaped, forced::Spellings, schema, structural_tag,
    vocabulary::token_env,
};
use crate::{EngineError, Tokenizer, error::with_known_stack};

/// Bytes that compiled grammars which no request has any more may take, by the compiler's own count.
const CACHE_BYTES: usize = 64 << 20;
/// Of a compiled grammar beside what its lexer counts.
const BASE_BYTES: usize = 64 << 10;
/// Bytes of the rules for a request's tools at most.
const MAX_RULES_BYTES: usize = 1 << 18;
/// Nesting of brackets in a grammar at most: its parsers recurse.
const MAX_DEPTH: usize = 128;
/// Expressions that a grammar intersects at most: to decide whether they have a text in common costs the product of their sizes.
pub(super) const MAX_INTERSECTED: usize = 8;
/// Texts of a choice at most.
const MAX_CHOICES: usize = 4096;
/// Items of an Earley row at most, where rules are the caller's: a token of ambiguous rules costs the cube of them, 20 ms or so
/// here.
const MAX_ITEMS: usize = 400;
/// The same of a schema or of rules of our own, which are not as ambiguous: a property that may be left out takes four.
const MAX_ITEMS_OF_SCHEMA: usize = 2000;
/// Address space, committed as it is used.
const STACK_BYTES: usize = 1 << 27;

fn limits(max_items_in_row: usize) -> ParserLimits {
    ParserLimits {
        max_items_in_row,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 30_000,
        step_max_items: 50_000,
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Compiles the grammars of one model's requests.
pub struct GrammarCompiler {
    tokenizer: Arc<Tokenizer>,
    spellings: Arc<Spellings>,
    vocab_size: usize,
    /// Made for the first grammar: most servers never see one.
    factory: OnceLock<Result<ParserFactory, String>>,
    /// The last used at the end.
    cache: Mutex<VecDeque<([u8; 32], Arc<Compiled>)>>,
}

/// A grammar that can be begun any number of times.
pub struct Compiled {
    /// Never advanced. Its lexer is behind a lock of its own.
    parser: Mutex<TokenParser>,
    spellings: Arc<Spellings>,
    may_have_specials: bool,
    vocab_size: usize,
    num_bytes: usize,
}

impl Compiled {
    /// A request's beginning, for each of its choices.
    pub fn begin(&self, num_choices: usize) -> Vec<Constraint> {
        let parser = self.parser.lock().unwrap_or_else(PoisonError::into_inner);
        // The choices of a request share the lexer, whose states are counted; requests do not.
        let matcher = Matcher::new(Ok(parser.deep_clone()));
        (0..num_choices)
            .map(|_| Constraint::new(matcher.clone(), &self.spellings, self.may_have_specials, self.vocab_size))
            .collect()
    }
}

impl GrammarCompiler {
    /// For a model with logits for `vocab_size` tokens.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: usize) -> Self {
        let spellings = Arc::new(Spellings::new(Arc::clone(&tokenizer)));
        Self { tokenizer, spellings, vocab_size, factory: OnceLock::new(), cache: Mutex::default() }
    }

    /// Compiles a grammar, or finds it.
    ///
    /// # Errors
    /// [`EngineError::Grammar`] says what is wrong with it, or which limit it is beyond.
    pub fn compile(&self, grammar: &Grammar) -> Result<Arc<Compiled>, EngineError> {
        self.compiled(key(grammar)?, grammar, || lowered(grammar, &self.tokenizer))
    }

    fn compiled(
        &self,
        key: [u8; 32],
        grammar: &Grammar,
        lower: impl FnOnce() -> Result<TopLevelGrammar, EngineError> + Send,
    ) -> Result<Arc<Compiled>, EngineError> {
        if let Some(found) = self.find(&key) {
            return Ok(found);
        }
        let parse = || {
            let lowered = lower()?;
            // They stand between angle brackets.
            let texts = || lowered.grammars.iter().filter_map(|grammar| grammar.lark_grammar.as_deref());
            let may_have_specials = texts().any(|text| text.contains('<'));
            Ok::<_, EngineError>((self.parser(grammar, lowered)?, may_have_specials))
        };
        let (parser, may_have_specials) = with_known_stack("grammar", STACK_BYTES, parse)
            .map_err(|why| fault_of(grammar).error(format!("the grammar cannot be read: {why}")))??;
        let num_bytes = BASE_BYTES + parser.parser.lexer_stats().num_bytes;
        let (spellings, vocab_size) = (Arc::clone(&self.spellings), self.vocab_size);
        let compiled = Arc::new(Compiled { parser: Mutex::new(parser), spellings, may_have_specials, vocab_size, num_bytes });
        self.keep(key, &compiled);
        Ok(compiled)
    }

    /// Compiles rules of our own, in which `@answer` is the grammar that a request gives, if it gives one.
    pub fn compile_rules(&self, rules: &str, answer: Option<&Grammar>) -> Result<Arc<Compiled>, EngineError> {
        if rules.len() > MAX_RULES_BYTES {
            let len = rules.len();
            return Err(GrammarFault::TooComplex.error(format!(
                "the grammar of the tools has {len} bytes; {MAX_RULES_BYTES} at most: offer fewer tools, or smaller schemas"
            )));
        }
        let answer_key = answer.map(key).transpose()?;
        let key = *blake3::hash(&[rules.as_bytes(), &answer_key.unwrap_or_default()[..]].concat()).as_bytes();
        self.compiled(key, answer.unwrap_or(&Grammar::Lark(String::new())), || {
            let mut top = TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(rules.to_owned()));
            if let Some(answer) = answer {
                let mut own = lowered(answer, &self.tokenizer)?;
                if let Some(first) = own.grammars.first_mut() {
                    first.name = Some("answer".into());
                }
                top.grammars.extend(own.grammars);
            }
            Ok(top)
        })
    }

    fn find(&self, key: &[u8; 32]) -> Option<Arc<Compiled>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let at = cache.iter().position(|(other, _)| other == key)?;
        let entry = cache.remove(at)?;
        let found = Arc::clone(&entry.1);
        cache.push_back(entry);
        Some(found)
    }

    fn keep(&self, key: [u8; 32], compiled: &Arc<Compiled>) {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.push_back((key, Arc::clone(compiled)));
        let mut total: usize = cache.iter().map(|(_, compiled)| compiled.num_bytes).sum();
        while total > CACHE_BYTES {
            let Some((_, oldest)) = cache.pop_front() else { break };
            total -= oldest.num_bytes;
        }
    }

    fn factory(&self) -> Result<&ParserFactory, EngineError> {
        let made = self.factory.get_or_init(|| {
            let env = token_env(&self.tokenizer, self.vocab_size);
            let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &SlicedBiasComputer::general_slices())
                .map_err(|error| error.to_string())?;
            factory.quiet();
            Ok(factory)
        });
        made.as_ref().map_err(|why| EngineError::Internal(format!("the vocabulary cannot be checked against grammars: {why}")))
    }

    fn parser(&self, grammar: &Grammar, lowered: TopLevelGrammar) -> Result<TokenParser, EngineError> {
        let max_items = match grammar {
            Grammar::Lark(rules) if !rules.is_empty() => MAX_ITEMS,
            Grammar::Llguidance(_) => MAX_ITEMS,
            _ => MAX_ITEMS_OF_SCHEMA,
        };
        let (init, capabilities) = (GrammarInit::Serialized(lowered), InferenceCapabilities::default());
        let made = self.factory()?.create_parser_from_init_ext(init, Logger::new(0, 0), capabilities, limits(max_items));
        let mut parser = made.map_err(|error| refusal(grammar, &format!("{error:#}")))?;
        if parser.parser.temperature().is_some() {
            return Err(GrammarFault::Syntax.error("the grammar sets a temperature: use the request's own"));
        }
        parser.start_without_prompt();
        // The library looks at later rows alone.
        let num_items = parser.parser_stats().all_items;
        if num_items > max_items {
            let text = format!("the grammar may begin in too many ways: {num_items} items of its parser; {max_items} at most");
            return Err(GrammarFault::TooComplex.error(text));
        }
        self.check_begins(grammar, &parser)?;
        Ok(parser)
    }

    /// Whether some token may come first; the lexer then knows what may.
    fn check_begins(&self, grammar: &Grammar, parser: &TokenParser) -> Result<(), EngineError> {
        let mut first = Constraint::new(Matcher::new(Ok(parser.clone())), &self.spellings, true, self.vocab_size);
        match first.mask() {
            Ok(_) => Ok(()),
            Err(error) => Err(refusal(grammar, &error.to_string())),
        }
    }
}

fn fault_of(grammar: &Grammar) -> GrammarFault {
    match grammar {
        Grammar::JsonSchema(_) => GrammarFault::Schema,
        _ => GrammarFault::Syntax,
    }
}

/// In our words where the library's are about its insides.
fn refusal(grammar: &Grammar, why: &str) -> EngineError {
    let why = why.split("\n<").next().unwrap_or_default().trim();
    let is_limit = ["too many", "too large", "too big", "too complex", "limit", "fuel", "exceeded"];
    let lower = why.to_lowercase();
    if is_limit.iter().any(|word| lower.contains(word)) {
        return GrammarFault::TooComplex.error(format!("the grammar is beyond a limit: {why}"));
    }
    let what = match grammar {
        Grammar::JsonSchema(_) => "the JSON schema cannot be enforced",
        Grammar::Regex(_) => "the regular expression cannot be used",
        _ => "the grammar cannot be read",
    };
    fault_of(grammar).error(format!("{what}: {why}"))
}

/// By what it is, and its text.
fn key(grammar: &Grammar) -> Result<[u8; 32], EngineError> {
    let (kind, text) = match grammar {
        Grammar::Regex(text) => ("regex", text.clone()),
        Grammar::JsonSchema(schema) => ("json", schema.to_string()),
        Grammar::Lark(text) => ("lark", text.clone()),
        Grammar::Llguidance(text) => ("llguidance", text.clone()),
        Grammar::Choice(texts) => ("choice", Value::from(texts.as_slice()).to_string()),
        Grammar::StructuralTag(tag) => ("structural_tag", tag.to_string()),
    };
    check_len("grammar has", text.len(), MAX_GRAMMAR_BYTES)?;
    Ok(*blake3::hash(format!("{kind}:{text}").as_bytes()).as_bytes())
}

fn check_len(what: &str, len: usize, most: usize) -> Result<(), EngineError> {
    if len <= most {
        return Ok(());
    }
    Err(GrammarFault::TooComplex.error(format!("the {what} {len} bytes; {most} at most")))
}

fn lowered(grammar: &Grammar, tokenizer: &Tokenizer) -> Result<TopLevelGrammar, EngineError> {
    match grammar {
        Grammar::Regex(text) => regex(text),
        Grammar::JsonSchema(schema) => Ok(TopLevelGrammar::from_json_schema(schema::prepared(schema)?)),
        Grammar::Lark(text) => lark(text).map(TopLevelGrammar::from_grammar),
        Grammar::Llguidance(text) => llguidance_form(text),
        Grammar::StructuralTag(tag) => {
            let rules = structural_tag::rules(tag, tokenizer)?;
            check_len("rules of the structural tag have", rules.len(), MAX_RULES_BYTES)?;
            Ok(TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(rules)))
        }
        Grammar::Choice(texts) => {
            if texts.is_empty() || texts.len() > MAX_CHOICES || texts.iter().any(String::is_empty) {
                let message =
                    format!("a choice has 1 to {MAX_CHOICES} texts of a character or more; this one has {}", texts.len());
                return Err(GrammarFault::Syntax.error(message));
            }
            let texts: Vec<String> = texts.iter().map(|text| escaped(text)).collect();
            Ok(TopLevelGrammar::from_regex(&texts.join("|")))
        }
    }
}

fn regex(text: &str) -> Result<TopLevelGrammar, EngineError> {
    check_depth(text)?;
    if text.is_empty() {
        return Err(GrammarFault::Syntax.error("the regular expression is empty: an answer has a character or more"));
    }
    Ok(TopLevelGrammar::from_regex(text))
}

fn lark(text: &str) -> Result<GrammarWithLexer, EngineError> {
    check_depth(text)?;
    if text.trim().is_empty() {
        return Err(GrammarFault::Syntax.error("the grammar is empty: give at least a rule `start`"));
    }
    // Such an attribute of a rule would not be honoured.
    let plain: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    if plain.contains("temperature=") {
        return Err(GrammarFault::Syntax.error("the grammar sets a temperature: use the request's own"));
    }
    let num_intersected = text.bytes().filter(|byte| matches!(byte, b'&' | b'~')).count() + count_patterns(text);
    if num_intersected > MAX_INTERSECTED {
        return Err(GrammarFault::TooComplex.error(format!(
            "the grammar has {num_intersected} intersections and complements, patterns below `allOf` included; {MAX_INTERSECTED} at most"
        )));
    }
    Ok(GrammarWithLexer::from_lark(text.to_owned()))
}

fn llguidance_form(text: &str) -> Result<TopLevelGrammar, EngineError> {
    if !text.trim_start().starts_with('{') {
        return lark(text).map(TopLevelGrammar::from_grammar);
    }
    let mut top: TopLevelGrammar = serde_json::from_str(text)
        .map_err(|error| GrammarFault::Syntax.error(format!("the grammar is not in llguidance's form: {error}")))?;
    if top.max_tokens.is_some() {
        return Err(GrammarFault::Syntax.error("the grammar sets `max_tokens`: use the request's own"));
    }
    for grammar in &mut top.grammars {
        if let Some(schema) = &mut grammar.json_schema {
            *schema = schema::prepared(schema)?;
        }
        if let Some(text) = &grammar.lark_grammar {
            lark(text)?;
        }
    }
    Ok(top)
}

/// Patterns of schemas within a grammar, where any may be intersected.
fn count_patterns(text: &str) -> usize {
    if text.contains("allOf") { text.matches("pattern").count() + text.matches("format").count() } else { 0 }
}

/// Brackets of all kinds, those in texts too.
pub(super) fn check_depth(text: &str) -> Result<(), EngineError> {
    let mut depth = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_DEPTH {
            return Err(GrammarFault::TooComplex.error(format!("the grammar has brackets nested deeper than {MAX_DEPTH}")));
        }
    }
    Ok(())
}
