"""The wordings of questions and fixed answers; ``{}`` stands for what is asked about."""

from __future__ import annotations

from .scenes import SHAPES

PLURALS = {s: "crosses" if s == "cross" else s + "s" for s in SHAPES}
NUMBERS = ["No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight"]

DESCRIBE = [
    "Describe this image.",
    "Describe the image.",
    "Describe this picture.",
    "What is in this image?",
    "What is in the picture?",
    "What do you see?",
    "Caption this image.",
    "Write a caption for this image.",
    "Can you describe this image?",
    "Describe the picture.",
    "What does this image show?",
    "Describe what you see.",
    "What is shown in this picture?",
]
READ = [
    "Read the text.",
    "What does the text say?",
    "What is written here?",
    "Read the text in the image.",
    "What does it say?",
    "What text is in the image?",
    "Which word is printed in the picture?",
    "Transcribe the text.",
    "Read this.",
]
COUNT = [
    "How many {} are there?",
    "How many {} are in the image?",
    "How many {} can you see?",
    "Count the {}.",
    "How many {} are in the picture?",
    "How many {} do you see?",
    "What is the number of {}?",
]
COLOUR = [
    "What colour is the {}?",
    "What color is the {}?",
    "Which colour is the {}?",
    "Which color is the {}?",
    "What is the colour of the {}?",
    "What is the color of the {}?",
    "What colour does the {} have?",
]
SHAPE = ["What shape is the {} object?", "What is the {} object?", "Which shape is {}?", "What shape is {}?"]
PRESENT = [
    "Is there a {}?",
    "Is there a {} in the image?",
    "Do you see a {}?",
    "Can you see a {}?",
    "Does the image show a {}?",
]
HIGHEST = [
    "Which bar is the highest?",
    "Which bar is highest?",
    "Which bar is the tallest?",
    "What is the highest bar?",
    "Which bar has the highest value?",
    "Which one is the highest?",
    "What is the tallest bar?",
]
LOWEST = [
    "Which bar is the lowest?",
    "Which bar is lowest?",
    "Which bar is the shortest?",
    "What is the lowest bar?",
    "Which bar has the lowest value?",
    "Which one is the lowest?",
    "Which bar is the smallest?",
]
VALUE = [
    "What is the value of {}?",
    "What value does {} have?",
    "How high is {}?",
    "What is the value of bar {}?",
    "What is the value for {}?",
    "How much is {}?",
]
MORE = [
    "Which picture has more {}?",
    "Which image has more {}?",
    "In which picture are there more {}?",
    "Which picture shows more {}?",
    "Which of the two pictures has more {}?",
    "Are there more {} in the first or the second picture?",
]
SAME_TEXT = [
    "Are both texts the same?",
    "Are the texts the same?",
    "Do both pictures show the same text?",
    "Is the text the same in both pictures?",
    "Do the two images show the same text?",
]
NTH = ["first", "second"]
DESCRIBE_NTH = [
    "Describe the {} image.",
    "Describe the {} picture.",
    "What is in the {} picture?",
    "What does the {} image show?",
]
READ_NTH = [
    "Read the text in the {} picture.",
    "What does the text in the {} image say?",
    "What is written in the {} picture?",
    "Read the {} text.",
]
COUNT_NTH = [
    "How many {} are in the {} picture?",
    "How many {} are there in the {} image?",
    "How many {} does the {} picture have?",
]
IMPERATIVES = ("Describe", "Caption", "Write", "Read", "Transcribe", "Count")
SYSTEM = [
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a helpful vision assistant.",
    "Describe images truly.",
]
PLACES = {
    ("left", "top"): "in the top left",
    ("mid", "top"): "at the top",
    ("right", "top"): "in the top right",
    ("left", "mid"): "on the left",
    ("mid", "mid"): "in the centre",
    ("right", "mid"): "on the right",
    ("left", "bottom"): "in the bottom left",
    ("mid", "bottom"): "at the bottom",
    ("right", "bottom"): "in the bottom right",
}
NO_TEXT, EMPTY = "There is no text.", "An empty picture."
FIRST, SECOND, BOTH = "The first picture.", "The second picture.", "Both have the same number."
