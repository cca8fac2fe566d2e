"""What the embedded model is made of: pictures, questions, tokenizer, training model, optimiser and export."""
