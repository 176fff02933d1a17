"""Which of some texts are alike, by the vectors that the default model makes of them.

The model writes text and was never trained for this. `Which.Embedding("google/embeddinggemma-300m")` knows by itself how.
"""

from mistral_paged import EmbeddingRequest, Runner, Which
from mistral_paged.default_model import default_model

TEXTS = [
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "The central bank raised its interest rates.",
]

with Runner(which=Which.Embedding(str(default_model()), pooling="mean"), pa_gpu_mem=256) as runner:
    vectors = runner.send_embedding_request(EmbeddingRequest(TEXTS))
    for i, text in enumerate(TEXTS):
        cosines = [sum(a * b for a, b in zip(vectors[i], other, strict=True)) for other in vectors]
        nearest = max((j for j in range(len(TEXTS)) if j != i), key=cosines.__getitem__)
        print(f"{text!r} is most like {TEXTS[nearest]!r}: {cosines[nearest]:.3f}")
    print(f"{len(vectors[0])} values each")
