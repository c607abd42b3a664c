#!/usr/bin/env python3
"""Writes text.jsonl, the text that pipelines/quickstart.yaml pretrains its small decoder on.

The text is made from the sentences below, in English and Chinese, with a fixed seed: running this again gives the same file.

    python3 pipelines/quickstart/make_text.py > pipelines/quickstart/text.jsonl
"""

import json
import random

PEOPLE = ["Anna", "Bo", "Clara", "Dan", "Edith", "Finn", "Greta", "Hugo", "Ida", "Jonas", "Karim", "Lin"]
TRADES = {
    "baker": ("bread", "a warm oven", "flour"),
    "carpenter": ("chairs", "a long bench", "oak"),
    "farmer": ("wheat", "a wide field", "seed"),
    "fisher": ("fish", "a blue boat", "rope"),
    "gardener": ("roses", "a quiet garden", "water"),
    "potter": ("bowls", "a round wheel", "clay"),
    "smith": ("horseshoes", "a hot forge", "iron"),
    "tailor": ("coats", "a bright window", "wool"),
    "teacher": ("lessons", "a small school", "books"),
    "weaver": ("blankets", "a tall loom", "thread"),
}
PLACES = ["the harbour", "the hill", "the market", "the mill", "the old bridge", "the river", "the square", "the woods"]
WEATHER = ["cold", "dry", "foggy", "rainy", "snowy", "sunny", "warm", "windy"]
ANIMALS = {
    "bee": ("gathers nectar", "a hive", "honey"),
    "cat": ("hunts mice", "a basket", "milk"),
    "cow": ("eats grass", "a barn", "hay"),
    "dog": ("guards the house", "a kennel", "bones"),
    "duck": ("swims on the pond", "the reeds", "weeds"),
    "hen": ("lays eggs", "a coop", "corn"),
    "horse": ("pulls the cart", "a stable", "oats"),
    "owl": ("watches at night", "a hollow tree", "mice"),
    "sheep": ("gives wool", "a fold", "clover"),
    "spider": ("spins a web", "a dark corner", "flies"),
}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
COLOURS = {"grass": "green", "snow": "white", "coal": "black", "the sky": "blue", "a lemon": "yellow", "blood": "red"}

ZH_PEOPLE = ["小红", "小明", "阿华", "小兰", "老王", "小李", "阿芳", "小周"]
ZH_TRADES = {
    "面包师": ("面包", "面粉"),
    "木匠": ("椅子", "木头"),
    "农夫": ("小麦", "种子"),
    "渔夫": ("鱼", "绳子"),
    "园丁": ("花", "水"),
    "老师": ("课", "书"),
    "裁缝": ("衣服", "布"),
    "铁匠": ("铁锅", "铁"),
}
ZH_PLACES = ["河边", "山上", "市场", "桥头", "学校", "树林里", "村口", "院子里"]
ZH_WEATHER = ["晴天", "雨天", "雪天", "大风天", "阴天"]
ZH_ANIMALS = {
    "猫": ("抓老鼠", "篮子里"),
    "狗": ("看家", "门口"),
    "牛": ("吃草", "牛棚里"),
    "马": ("拉车", "马厩里"),
    "鸡": ("下蛋", "鸡舍里"),
    "羊": ("产羊毛", "羊圈里"),
    "蜜蜂": ("采花蜜", "蜂巢里"),
    "鸭子": ("在池塘里游泳", "芦苇里"),
}
ZH_NUMBERS = ["一", "二", "三", "四", "五", "六", "七", "八", "九", "十"]


def story(r):
    name, friend = r.sample(PEOPLE, 2)
    trade = r.choice(sorted(TRADES))
    makes, home, needs = TRADES[trade]
    animal = r.choice(sorted(ANIMALS))
    does, lives, eats = ANIMALS[animal]
    place, other = r.sample(PLACES, 2)
    return r.choice([
        f"{name} is a {trade}. Every day {name} works with {needs} and makes {makes}. {name} has {home} near {place}. "
        f"On {r.choice(DAYS)} {friend} comes by and they walk to {other} together.",
        f"On a {r.choice(WEATHER)} morning {name} walked from {place} to {other}. There {name} met {friend}, the {trade}. "
        f"\"Do you need {needs}?\" asked {name}. \"Yes,\" said {friend}, \"without {needs} there would be no {makes}.\"",
        f"{name} has a {animal}. The {animal} {does} and lives in {lives}. In the evening {name} brings it {eats}. "
        f"When it is {r.choice(WEATHER)}, the {animal} stays at home.",
        f"Near {place} there is {home}. It belongs to {name}, who is a {trade}. {friend} bought some "
        f"of the {makes} and went on to {other}.",
    ])


def zh_story(r):
    name, friend = r.sample(ZH_PEOPLE, 2)
    trade = r.choice(sorted(ZH_TRADES))
    makes, needs = ZH_TRADES[trade]
    animal = r.choice(sorted(ZH_ANIMALS))
    does, lives = ZH_ANIMALS[animal]
    return r.choice([
        f"{name}是{trade}。{name}每天用{needs}做{makes}。{r.choice(ZH_WEATHER)}的时候，{friend}来看{name}，他们一起去{r.choice(ZH_PLACES)}。",
        f"{name}养了一只{animal}。{animal}会{does}，晚上住在{lives}。{friend}很喜欢这只{animal}。",
        f"{r.choice(ZH_WEATHER)}的早上，{name}在{r.choice(ZH_PLACES)}遇见了{friend}。{friend}是{trade}，今天要买{needs}。",
    ])


def question(r):
    trade = r.choice(sorted(TRADES))
    makes, home, needs = TRADES[trade]
    animal = r.choice(sorted(ANIMALS))
    does, lives, eats = ANIMALS[animal]
    thing = r.choice(sorted(COLOURS))
    i = r.randrange(len(DAYS))
    n, m = r.randrange(6), r.randrange(6)
    name = r.choice(PEOPLE)
    ask, answer = r.choice([
        (f"What does a {trade} make?", f"A {trade} makes {makes}."),
        (f"What does a {trade} need?", f"A {trade} needs {needs}."),
        (f"Who makes {makes}?", f"The {trade} makes {makes}."),
        (f"Where does a {trade} work?", f"A {trade} works at {home}."),
        (f"What does a {animal} do?", f"A {animal} {does}."),
        (f"Where does a {animal} live?", f"A {animal} lives in {lives}."),
        (f"What does a {animal} like?", f"A {animal} likes {eats}."),
        (f"What colour is {thing}?", f"{thing[0].upper()}{thing[1:]} is {COLOURS[thing]}."),
        (f"Which day comes after {DAYS[i]}?", f"After {DAYS[i]} comes {DAYS[(i + 1) % 7]}."),
        (f"What is {NUMBERS[n]} plus {NUMBERS[m]}?", f"{NUMBERS[n].capitalize()} plus {NUMBERS[m]} is {NUMBERS[n + m + 1]}."),
        (f"Who is {name}?", f"{name} is a {trade} who lives near {r.choice(PLACES)}."),
        ("Who are they?", f"They are {r.choice(PEOPLE)} and {r.choice(PEOPLE)} from {r.choice(PLACES)}."),
    ])
    return f"Question: {ask}\nAnswer: {answer}"


def zh_question(r):
    trade = r.choice(sorted(ZH_TRADES))
    makes, needs = ZH_TRADES[trade]
    animal = r.choice(sorted(ZH_ANIMALS))
    does, lives = ZH_ANIMALS[animal]
    n, m = r.randrange(5), r.randrange(5)
    name = r.choice(ZH_PEOPLE)
    ask, answer = r.choice([
        (f"{trade}做什么?", f"{trade}做{makes}。"),
        (f"{trade}需要什么?", f"{trade}需要{needs}。"),
        (f"{animal}会什么?", f"{animal}会{does}。"),
        (f"{animal}住在哪里?", f"{animal}住在{lives}。"),
        (f"{ZH_NUMBERS[n]}加{ZH_NUMBERS[m]}是多少?", f"{ZH_NUMBERS[n]}加{ZH_NUMBERS[m]}是{ZH_NUMBERS[n + m + 1]}。"),
        (f"{name}是谁?", f"{name}是{trade}，住在{r.choice(ZH_PLACES)}。"),
    ])
    return f"Question: {ask}\nAnswer: {answer}"


def main():
    r = random.Random(7)
    makers = [story] * 5 + [question] * 6 + [zh_story] * 2 + [zh_question] * 3
    for _ in range(2400):
        print(json.dumps({"text": r.choice(makers)(r)}, ensure_ascii=False))


if __name__ == "__main__":
    main()
