"""Words that stand in answers of mathematics: units, things that are counted, scales, numbers, operations.

Only what is in these tables has a meaning; any other word is compared as a word (math_reading.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

Dimensions = tuple[tuple[str, int], ...]  # sorted: (("length", 1), ("time", -1)); of what is counted: ()


@dataclass(frozen=True, slots=True)
class Unit:
    """What it measures, and how many of the base unit it is.  Units without dimensions are things that are counted."""

    dimensions: Dimensions
    factor: Fraction = Fraction(1)

    def times(self, other: Unit, exponent: int = 1) -> Unit:
        """Return the product with a power of another unit."""
        powers = dict(self.dimensions)
        for name, power in other.dimensions:
            powers[name] = powers.get(name, 0) + power * exponent
        kept = tuple(sorted((name, power) for name, power in powers.items() if power))
        return Unit(kept, self.factor * other.factor**exponent)


COUNT = Unit(())

# dimension: "factor spelling spelling …; …"; a plural in s is added.
_MEASURES = {
    "length": "1 m meter metre; 1/1000000000 nm nanometer nanometre; 1/1000000 µm μm um micrometer micrometre micron;"
    " 1/1000 mm millimeter millimetre; 1/100 cm centimeter centimetre; 1/10 dm decimeter decimetre;"
    " 1000 km kilometer kilometre; 254/10000 in inch inches; 3048/10000 ft foot feet; 9144/10000 yd yard;"
    " 1609344/1000 mi mile",
    "mass": "1 g gram gramme gm; 1/1000 mg milligram; 1/1000000 µg μg ug microgram; 1000 kg kilogram kilo kgm;"
    " 1000000 ton tonne; 45359237/100000 lb lbs pound-mass; 45359237/1600000 oz ounce",
    "time": "1 s sec second; 1/1000 ms millisecond; 1/1000000 µs μs us microsecond; 1/1000000000 ns nanosecond;"
    " 60 min minute; 3600 h hr hour; 86400 day; 604800 week wk; 2629746 month; 31556952 year yr; 315569520 decade;"
    " 3155695200 century centuries",
    "volume": "1 l L liter litre ltr; 1/1000 ml mL milliliter millilitre; 1/100 cl cL centiliter centilitre;"
    " 3785411784/1000000000 gal gallon; 946352946/1000000000 qt quart; 473176473/1000000000 pint;"
    " 2365882365/10000000000 cup; 1478676478125/100000000000000 tablespoon tbsp;"
    " 492892159375/100000000000000 teaspoon tsp; 35239/1000 bushel; 30 drop-of",
    "temperature": "1 ℃ Celsius celsius centigrade; 1 K kelvin",
    "fahrenheit": "1 ℉ Fahrenheit fahrenheit",
    "money": "1 $ dollar USD usd buck; 1/100 cent ¢; 1/20 nickel; 1/10 dime",
    "euro": "1 € euro EUR eur",
    "pound": "1 £ GBP gbp quid; 1/100 pence penny pennies",
    "yen": "1 ¥ yen JPY jpy yuan RMB CNY",
    "rupee": "1 ₹ rupee Rs Rs. INR",
    "peso": "1 peso; 1 ₱",
    "won": "1 ₩ won",
    "force": "1 N newton Newton; 1000 kN kilonewton",
    "energy": "1 J joule Joule; 1000 kJ kilojoule; 1000000 MJ megajoule; 3600000 kWh kilowatt-hour; 4184/1000 cal;"
    " 4184 kcal Calorie; 1/1000000000000000000 eV",
    "power": "1 W watt Watt; 1000 kW kilowatt; 1000000 MW megawatt",
    "voltage": "1 V volt Volt; 1/1000 mV millivolt",
    "current": "1 A amp ampere Ampere; 1/1000 mA milliamp",
    "resistance": "1 Ω ohm Ohm \\Omega; 1000 kΩ",
    "pressure": "1 Pa pascal Pascal; 1000 kPa kilopascal; 101325 atm; 100000 bar-unit",
    "frequency": "1 Hz hertz Hertz; 1000 kHz; 1000000 MHz; 1000000000 GHz",
    "charge": "1 C coulomb Coulomb; 1/1000000 µC μC",
    "amount": "1 mol mole; 1/1000 mmol",
    "information": "1 byte B; 1/8 bit; 1000 kB KB kilobyte; 1000000 MB megabyte; 1000000000 GB gigabyte;"
    " 1000000000000 TB terabyte",
    "angle": "1 rad radian",
    "area": "1 acre",
    "hectare": "1 hectare ha",
}  # fmt: skip
_VARIABLES = frozenset("msghlLNJWVAKCB")  # a unit or a variable, where nothing says that it is upright
_SHORT_SCALES = frozenset("KB")  # 5 K may be 5000

# Things that people count, in the plural; their singular is added.
_COUNTED = """
acorns actors adults albums animals answers antacids ants apartments appetizers apples apps arrangements arrows articles
artists artworks athletes attendees avocados babies bags baguettes bakers bales balloons balls bananas bandages bands
barrels bars baseballs basketballs baskets batches baths batteries beads beakers beans bears bedrooms beds bees berries
bicycles bikes bills birds biscuits blankets blisters blocks blouses blueberries boats bolts bones bonuses books bottles
bouquets bowls boxes boys bracelets branches bricks brothers brownies brushes bubbles buckets bugs builders buildings
bulbs bundles bunnies burgers burritos buses bushels businesses butterflies buttons cabinets cakes calculators calls
calories cameras campers candies candles cans caps cards carnations carrots cars cartons cases casts cats cells chairs
chapters characters cherries chickens children chips chocolates choices circles classes classmates classrooms clients
clips cloves clusters coats coconuts coins colors colours combinations computers containers contestants cookies copies
corns costumes countries couples coupons cousins cows crabs crackers crates crayons credits crickets crows cubes
cucumbers cupcakes customers dates daughters decorations deer degrees desks devices diagonals diamonds dice digits
discounts dishes divisors doctors dogs dolls donuts doors doses doughnuts dresses drinks drops drums ducklings ducks
earrings ears edges eggs elements elephants emails employees entries envelopes episodes erasers errors events exams eyes
faces factors families fans farmers feathers figures figurines files fingers fireworks fishes flags flavors flights
floors flowers flutes followers footballs forks frames friends frogs fruits functions games gates geese ghosts gifts
giraffes girls glasses gloves gnomes goals goats goldfish grades grains grandchildren grapes groups guests guitars
guppies haircuts hamburgers hands handshakes hats heads hens hikes hits holes homes horses hotdogs houses insects
integers items jackets jars jeans jelly jellybeans jewels jobs journals judges jumps keys kids kittens knives lambs
lamps laps lawns leaves legs lemons lessons letters lights lilies lines lions lipsticks lizards loads loaves logs
lollipops lots magazines magnets mangoes maps marbles markers marks marshmallows masks matches math meals medals members
men messages mice milkshakes minnows mistakes monkeys motorcycles movies muffins multiples mushrooms nails names napkins
necklaces neighbors nephews newspapers nieces nights notebooks notes novels numbers nuts objects onions oranges orders
outcomes outfits oysters packages packets packs paddles pages paintings pairs pancakes pans pants papers parents parrots
participants parts passengers pastries paths patients paws peaches peanuts pearls pears peas pebbles pencils penguins
pens people peppers permutations persons petals pets phones photographs photos pictures pieces pies pigeons pigs pillows
pills pineapples pizzas places planes plants plates players plums points poodles popsicles posters posts potatoes pots
pounds presents primes prizes problems products programs pumpkins pupils puppets puppies purses puzzles questions
quizzes rabbits racers rats records regions ribbons rings robots rocks rolls rooms roots roses rounds rows rubies rugs
runners sacks salads sandwiches scarves schools scoops screws seashells seasons seats sections seeds segments
sentences servings sessions sets shapes sharks sheep sheets shells shelves ships shirts shoes shops shots shows shrimp
siblings sides sisters skips skirts slices snacks snails snakes snowballs snowflakes soaps socks sodas soldiers
solutions songs sons spiders spoons sports spots squares squirrels stairs stamps starfish stars states stems steps
stickers sticks stitches stones stools stores stories strands strawberries straws streets strings students subjects
subsets suitcases surfers swans sweaters sweets swimmers tables tablets tacos tadpoles tanks tapes tasks teachers teams
teeth tents terms tests texts things tickets tiles timers times tires tissues toddlers toes tokens tomatoes tools
toothbrushes toothpicks towels towers toys trains trays trees triangles tricks trips trolls trophies trucks trumpets
tubes tubs tulips turkeys turns turtles twigs unicorns units values vampires vans vases vehicles vertices vests videos
violins visitors visits votes waffles wagons walls watches watermelons waves ways weeds weekdays weekends whales wheels
widgets windows wings winners women words workers worms yachts zebras zombies
"""
_SINGULARS = {"primes": "primes", "children": "child", "men": "man",
              "women": "woman", "people": "person", "mice": "mouse", "teeth": "tooth",
              "geese": "goose", "vertices": "vertex", "dice": "die", "leaves": "leaf", "loaves": "loaf",
              "knives": "knife", "shelves": "shelf", "scarves": "scarf", "grandchildren": "grandchild"}  # fmt: skip
# Words beside a thing that is counted, which change nothing: "12 red balls left".
_BESIDE = (
    "altogether apiece big black blue brown different distinct each extra full gold gray green grey in large left long "
    "more new of old orange pink positive possible purple real red regular remaining silver small tall the total "
    "unique wide white whole yellow"
)
_NEEDLESS = frozenset(
    {
        "each",
        "left",
        "in",
        "total",
        "altogether",
        "apiece",
        "remaining",
        "old",
        "tall",
        "long",
        "wide",
        "high",
        "deep",
        "away",
        "ago",
    }
)  # also without a thing
_SHORT = {"mph": "mi/h", "mpg": "mi/gal", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "sqft": "ft2", "rpm": "1/min",
          "fps": "ft/s", "bps": "bit/s", "cc": "cm3"}  # fmt: skip


def _plurals(word: str) -> Iterator[str]:
    yield word
    if len(word) > 1 and word.isalpha() and not word.endswith("s"):
        yield word + "s"


def _measures() -> Iterator[tuple[str, Unit]]:
    powers = {"volume": (("length", 3), Fraction(1, 1000)), "area": (("length", 2), Fraction(40468564224, 10**7)),
              "hectare": (("length", 2), Fraction(10_000))}  # fmt: skip
    for dimension, entries in _MEASURES.items():
        base, scale = powers.get(dimension, ((dimension, 1), Fraction(1)))
        for entry in entries.split(";"):
            factor, *words = entry.split()
            for word in words:
                for spelling in _plurals(word):
                    yield spelling, Unit((base,), Fraction(factor) * scale)


def _counted() -> Iterator[str]:
    for word in _COUNTED.split():
        yield word
        if word in _SINGULARS:
            yield _SINGULARS[word]
        elif word.endswith(("ches", "shes", "sses", "xes", "oes", "zzes")):
            yield word[:-2]
        elif word.endswith("ies") and word not in ("pies", "movies", "cookies", "brownies"):
            yield word[:-3] + "y"
        elif word.endswith("s"):
            yield word[:-1]


UNITS: Mapping[str, Unit] = MappingProxyType(dict.fromkeys(_counted(), COUNT) | dict(_measures()))
DEGREES_WORDS = frozenset({"degree", "degrees", "deg"})
CURRENCY_SIGNS = "$€£¥₹₱₩"


def unit_of(word: str) -> Unit | None:
    """Return the unit that a word spells; None where it is none.  Capitals count up to three letters: mW is not MW."""
    return UNITS.get(word) or (UNITS.get(word.lower()) if len(word) > 3 else None)


def may_be_variable(word: str) -> bool:
    """Whether a word that spells a unit is rather a letter of an expression, unless it is upright."""
    return word in _VARIABLES


def may_be_scale(word: str) -> bool:
    """Whether a letter that spells a unit may also be short for a scale."""
    return word in _SHORT_SCALES


def abbreviation(word: str) -> str | None:
    """Return the units that a word such as mph abbreviates."""
    return _SHORT.get(word.lower())


def is_beside_unit(word: str) -> bool:
    """Whether a word beside something counted changes nothing: "12 red balls left"."""
    return word.lower() in _BESIDE.split()


def is_needless(word: str) -> bool:
    """Whether a word behind a number alone changes nothing: "12 in total"."""
    return word.lower() in _NEEDLESS


_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBERS: Mapping[str, int] = MappingProxyType(
    {word: value for value, word in enumerate(_ONES.split())}
    | {word: 10 * value for value, word in enumerate(_TENS.split(), 2)}
)
_POWERS = {
    "hundred": 2, "thousand": 3, "lakh": 5, "lac": 5, "million": 6, "crore": 7, "milliard": 9, "billion": 9,
    "trillion": 12, "quadrillion": 15, "quintillion": 18, "sextillion": 21, "septillion": 24, "octillion": 27,
    "nonillion": 30, "decillion": 33, "googol": 100,
}  # fmt: skip
_GROUPS = {"dozen": 12, "score": 20, "gross": 144, "grand": 1000, "mn": 10**6, "mln": 10**6, "bn": 10**9,
           "bln": 10**9, "tn": 10**12, "mio": 10**6, "mrd": 10**9, "myriad": 10**4, "tens": 10}  # fmt: skip
SCALES: Mapping[str, int] = MappingProxyType(
    {word + ending: 10**power for word, power in _POWERS.items() for ending in ("", "s")}
    | {word + ending: value for word, value in _GROUPS.items() for ending in ("", "s")}
)
_ORDINALS = (
    "third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth sixteenth "
    "seventeenth eighteenth nineteenth"
)
PARTS: Mapping[str, Fraction] = MappingProxyType(
    {word + ending: Fraction(1, value) for value, word in enumerate(_ORDINALS.split(), 3) for ending in ("", "s")}
    | {"half": Fraction(1, 2), "halves": Fraction(1, 2), "quarter": Fraction(1, 4), "quarters": Fraction(1, 4)}
    | {word[:-1] + "ieth" + ending: Fraction(1, 10 * value)
       for value, word in enumerate(_TENS.split(), 2) for ending in ("", "s")}
    | {word + "th" + ending: Fraction(1, 10**power) for word, power in _POWERS.items() for ending in ("", "s")}
)  # fmt: skip

# Phrases, longest first, and what they are in TeX.
_PHRASES = tuple(
    (tuple(phrase.split()), tex)
    for phrase, tex in (
        ("to the power of", "^"),
        ("the square root of", "sqrt"),
        ("the cube root of", "cbrt"),
        ("square root of", "sqrt"),
        ("cube root of", "cbrt"),
        ("root of", "sqrt"),
        ("root", "sqrt"),
        ("divided by", "/"),
        ("multiplied by", r"\times"),
        ("times", r"\times"),
        ("plus", "+"),
        ("minus", "-"),
        ("negative", "-"),
        ("over", "/"),
        ("squared", "^2"),
        ("cubed", "^3"),
        ("factorial", "!"),
        ("twice", "2 \\cdot "),
        ("double", "2 \\cdot "),
        ("triple", "3 \\cdot "),
        ("per cent", "%"),
        ("percent", "%"),
        ("percents", "%"),
        ("percentage", "%"),
        ("pct", "%"),
        ("is equal to", "="),
        ("equals", "="),
    )
)
OPERATIONS: Mapping[str, tuple[tuple[tuple[str, ...], str], ...]] = MappingProxyType(  # by their first word
    {first: tuple(pair for pair in _PHRASES if pair[0][0] == first) for first in {phrase[0] for phrase, _ in _PHRASES}}
)
