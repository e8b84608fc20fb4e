"""Which heads of MiniLM link "she" to its two candidates, and what happens without the best of them."""

import torch

import headwise as hw
from headwise.models.pretrained import load_encoder_or_decoder

model, tokenizer = load_encoder_or_decoder("minilm")
inputs = tokenizer("The scientist thanked the engineer because she solved the problem.", return_tensors="pt")

with torch.no_grad():
    with hw.watch(model, tokenizer) as heads:
        before = model(**inputs).last_hidden_state

    for link in heads.find(("she", "scientist"), ("she", "engineer")):
        print(f"{link.source} -> {link.target}")
        for entry in link.ranking[:3]:
            layer, head, weight = entry
            print(f"    head {layer}.{head}: {weight:.2f}; all other rows give {link.target} {entry.others:.2f}")

    layer, head, _ = heads.find(("she", "scientist"))[0].ranking[0]
    with hw.ablate(model, [(layer, head)]):
        after = model(**inputs).last_hidden_state

print(f"switching head {layer}.{head} off moves the output by {(after - before).norm() / before.norm():.1%}")
