//! The pre-tokenizers that GGUF files name in `tokenizer.ggml.pre`: how text is cut before byte-level BPE.
//!
//! The expressions are those of the models' own tokenizer.json files, which llama.cpp's table of names refers to.

use serde_json::Value;

/// Contractions in any case.
macro_rules! contractions {
    () => {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}

/// GPT-2's expression.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str =
    concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+");
const QWEN2: &str =
    concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+");
const QWEN35: &str =
    concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+");
const SEED_CODER: &str =
    concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+");
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
pub(super) const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    contractions!(),
    r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    contractions!(),
    r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// Kana, and Chinese characters of the first block.
const CJK: &str = "[一-龥぀-ゟ゠-ヿ]+";
const WITHOUT_CONTRACTIONS: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Spaces in powers of two.
const JAIS2: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
);
/// Words with the spaces between them.
const EXAONE_MOE: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
);
const MINICPM5: &str =
    concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+");
/// Joiners belong to words.
const K2_HORIZON: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}\x{200C}\x{200D}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const YOUTU_SCRIPTS: &str = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+";
const YOUTU: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    contractions!(),
    r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    contractions!(),
    r"?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const KIMI_K2: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    contractions!(),
    r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    contractions!(),
    r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
/// Digits by three, from the last on.
const AFMOE_DIGITS: &str = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|\z))";
const AFMOE_CJK: &str =
    "[一-鿿㐀-䶿豈-\u{FAFF}぀-ゟ゠-ヿ･-ﾟ⼀-\u{2FDF}เ-\u{E7F}\u{E80}-\u{EFF}ក-\u{17FF}က-႟ꩠ-ꩿꧠ-\u{A9FF}가-\u{D7AF}ᄀ-ᇿ]+";
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const DEEPSEEK_CJK: &str = r"[一-龥ࠀ-一가-퟿]+";
/// Cased letters of the Latin, Greek, Cyrillic and related scripts; escapes where normalisation would change the source.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";

/// How one family of models cuts text.
pub(super) struct PreTokenizer {
    /// Its names in GGUF files.
    names: &'static [&'static str],
    /// Expressions applied one after the other, each to what the ones before left whole.
    pub expressions: &'static [&'static str],
    /// A word that is a token is taken as it is, whatever the merges say.
    pub ignore_merges: bool,
    /// BOS is added unless the file says otherwise.
    pub add_bos: bool,
    /// Text is brought to Unicode's composed form (NFC) first.
    pub compose: bool,
}

const fn rule(names: &'static [&'static str], expressions: &'static [&'static str]) -> PreTokenizer {
    PreTokenizer { names, expressions, ignore_merges: false, add_bos: false, compose: false }
}

static PRE_TOKENIZERS: [PreTokenizer; 31] = [
    rule(&["default"], &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    rule(
        &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
        ],
        &[GPT2],
    ),
    rule(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"], &[r"\p{N}", GPT2]),
    PreTokenizer {
        ignore_merges: true,
        add_bos: true,
        ..rule(
            &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
            &[LLAMA3],
        )
    },
    rule(&["dbrx", "smaug-bpe", "glm4", "chatglm-bpe", "glm5"], &[LLAMA3]),
    PreTokenizer { compose: true, ..rule(&["qwen2", "deepseek-r1-qwen", "kormo", "megrez", "f2llmv2"], &[QWEN2]) },
    rule(&["stablelm2", "hunyuan", "solar-open", "grok-2"], &[QWEN2]),
    PreTokenizer { compose: true, ..rule(&["qwen35"], &[QWEN35]) },
    PreTokenizer { ignore_merges: true, add_bos: true, ..rule(&["tekken"], &[TEKKEN]) },
    rule(&["gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"], &[GPT4O]),
    rule(&["deepseek-llm"], &["[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", DEEPSEEK_CJK, r"\p{N}+"]),
    rule(&["deepseek-coder"], &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}"]),
    rule(&["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], &[r"\p{N}{1,3}", CJK, DEEPSEEK_V3]),
    rule(&["falcon"], &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    rule(&["poro-chat", "bloom", "gpt3-finnish"], &[BLOOM]),
    rule(&["bailingmoe", "bailingmoe2", "llada-moe"], &[BAILING]),
    rule(&["seed-coder"], &[SEED_CODER]),
    rule(&["viking"], &[BLOOM, r"\p{N}"]),
    rule(&["jais-2"], &[JAIS2]),
    rule(&["exaone-moe"], &[EXAONE_MOE]),
    PreTokenizer { ignore_merges: true, ..rule(&["youtu"], &[YOUTU_SCRIPTS, YOUTU]) },
    PreTokenizer { ignore_merges: true, ..rule(&["minicpm5"], &[r"\p{N}{1,3}", MINICPM5]) },
    PreTokenizer {
        add_bos: true,
        ..rule(
            &["chameleon"],
            &[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ],
        )
    },
    rule(&["tiny_aya", "cohere2moe"], &[r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O]),
    rule(&["superbpe"], &[r"\p{N}+", r"(?=(\d{3})+(?!\d))"]),
    rule(&["kimi-k2"], &[KIMI_K2]),
    rule(&["afmoe"], &[AFMOE_DIGITS, AFMOE_CJK, DEEPSEEK_V3]),
    rule(&["laguna"], &[r"[^\n]+|[\n]+", QWEN2]),
    rule(&["spark2_5"], &[r"\p{N}{1,3}", CJK, SPARK, r"\p{N}"]),
    rule(&["ufakzeka"], &[WITHOUT_CONTRACTIONS]),
    rule(&["k2-horizon"], &[K2_HORIZON]),
];

/// The pre-tokenizer of that name.
pub(super) fn pre_tokenizer(name: &str) -> Option<&'static PreTokenizer> {
    PRE_TOKENIZERS.iter().find(|p| p.names.contains(&name))
}

/// The name of the pre-tokenizer of a tokenizer.json, as GGUF files have it; `None` where it has none.
pub(crate) fn pre_tokenizer_name(json: &Value) -> Option<&'static str> {
    let compose = match json["normalizer"]["type"].as_str() {
        None => false,
        Some("NFC") => true,
        Some(_) => return None,
    };
    let mut expressions = Vec::new();
    add_expressions(&json["pre_tokenizer"], &mut expressions)?;
    let ignore_merges = json["model"]["ignore_merges"].as_bool().unwrap_or(false);
    let is_same =
        |rule: &&PreTokenizer| rule.expressions == expressions && (rule.ignore_merges, rule.compose) == (ignore_merges, compose);
    PRE_TOKENIZERS.iter().find(is_same).map(|rule| rule.names[0])
}

/// What a pre-tokenizer of a tokenizer.json cuts by; `None` for what no expression says.
fn add_expressions<'a>(part: &'a Value, expressions: &mut Vec<&'a str>) -> Option<()> {
    match part["type"].as_str()? {
        "Sequence" => part["pretokenizers"].as_array()?.iter().try_for_each(|part| add_expressions(part, expressions)),
        "Split" if part["behavior"] == "Isolated" && part["invert"] != true => {
            expressions.push(part["pattern"]["Regex"].as_str()?);
            Some(())
        }
        "Digits" if part["individual_digits"] == true => {
            expressions.push(r"\p{N}");
            Some(())
        }
        "ByteLevel" if part["add_prefix_space"] != true => {
            // Left out, it is used.
            if part["use_regex"] != false {
                expressions.push(GPT2);
            }
            Some(())
        }
        _ => None,
    }
}

/// Every name, for error messages.
pub(super) fn known_names() -> String {
    PRE_TOKENIZERS.iter().flat_map(|p| p.names).copied().collect::<Vec<_>>().join(", ")
}
